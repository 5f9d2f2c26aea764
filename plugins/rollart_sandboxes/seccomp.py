"""The seccomp filter of bubblewrap sandboxes: the system calls that code in them cannot make.

Takes: a machine type. Gives: a classic BPF program, as ``bwrap --seccomp`` reads it. Never: loads
it.

It refuses what Docker's default profile (moby, ``profiles/seccomp/default.json``) refuses to a
container without capabilities, io_uring, and address families other than Unix, IP and netlink.
Calls newer than the table, and calls of another ABI (32-bit, x32), are refused as unknown. The
instructions are those of ``linux/filter.h``, and the fields those of ``struct seccomp_data``.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_ABOVE: Final = 0x25  # BPF_JMP | BPF_JGT | BPF_K
_ANY_BIT: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000

_NEWEST: Final = 462
"""``mseal``, of Linux 6.10. Both tables end here; from 424 on they are the same."""

_NAMESPACES: Final = 0x7E020000
"""All ``CLONE_NEW*`` flags that ``clone`` accepts."""
_FAMILIES: Final = (1, 2, 10, 16)
"""``AF_UNIX``, ``AF_INET``, ``AF_INET6`` and ``AF_NETLINK``."""
_PERSONAS: Final = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""The values that Docker allows; the last one queries the current personality."""
_TERMINAL_INPUT: Final = (0x5412, 0x541C)
"""``TIOCSTI`` and ``TIOCLINUX``, which insert terminal input as if a person had typed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abi:
    """The numbers of one machine type, from ``asm/unistd.h``."""

    arch: int
    clone: int
    personality: int
    socket: int
    socketpair: int
    ioctl: int
    refused: dict[str, int]


_COMMON: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "set_mempolicy_home_node": 450,
    "statmount": 457,
    "listmount": 458,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
}
_CLONE3: Final = 435
"""Its flags are in memory, which a filter cannot read. C libraries use ``clone`` if it is unknown.
"""

_ABIS: Final = {
    "x86_64": _Abi(
        arch=0xC000003E,
        clone=56,
        personality=135,
        socket=41,
        socketpair=53,
        ioctl=16,
        refused=_COMMON
        | {"acct": 163, "add_key": 248, "bpf": 321, "chroot": 161, "clock_adjtime": 305}
        | {"clock_settime": 227, "create_module": 174, "delete_module": 176, "fanotify_init": 300}
        | {"finit_module": 313, "get_kernel_syms": 177, "get_mempolicy": 239, "init_module": 175}
        | {"ioperm": 173, "iopl": 172, "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246}
        | {"keyctl": 250, "lookup_dcookie": 212, "mbind": 237, "migrate_pages": 256, "mount": 165}
        | {"move_pages": 279, "nfsservctl": 180, "open_by_handle_at": 304, "perf_event_open": 298}
        | {"pivot_root": 155, "query_module": 178, "quotactl": 179, "reboot": 169}
        | {"request_key": 249, "set_mempolicy": 238, "setdomainname": 171, "sethostname": 170}
        | {"setns": 308, "settimeofday": 164, "swapoff": 168, "swapon": 167, "_sysctl": 156}
        | {"sysfs": 139, "syslog": 103, "umount2": 166, "unshare": 272, "uselib": 134}
        | {"userfaultfd": 323, "ustat": 136, "vhangup": 153},
    ),
    "aarch64": _Abi(
        arch=0xC00000B7,
        clone=220,
        personality=92,
        socket=198,
        socketpair=199,
        ioctl=29,
        refused=_COMMON
        | {"acct": 89, "add_key": 217, "bpf": 280, "chroot": 51, "clock_adjtime": 266}
        | {"clock_settime": 112, "delete_module": 106, "fanotify_init": 262, "finit_module": 273}
        | {"get_mempolicy": 236, "init_module": 105, "kcmp": 272, "kexec_file_load": 294}
        | {"kexec_load": 104, "keyctl": 219, "lookup_dcookie": 18, "mbind": 235, "mount": 40}
        | {"migrate_pages": 238, "move_pages": 239, "nfsservctl": 42, "open_by_handle_at": 265}
        | {"perf_event_open": 241, "pivot_root": 41, "quotactl": 60, "reboot": 142}
        | {"request_key": 218, "set_mempolicy": 237, "setdomainname": 162, "sethostname": 161}
        | {"setns": 268, "settimeofday": 170, "swapoff": 225, "swapon": 224, "syslog": 116}
        | {"umount2": 39, "unshare": 97, "userfaultfd": 282, "vhangup": 58},
    ),
}

MACHINES: Final = tuple(_ABIS)
"""The machine types that have a filter, as ``os.uname`` names them."""


def program(machine: str) -> bytes | None:
    """Return the filter for a machine type; None if there is none.

    Args:
        machine: For example ``x86_64``.
    """
    abi = _ABIS.get(machine)
    if abi is None:
        return None
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(abi))


_Instruction = tuple[int, int, int, int]


def _instructions(abi: _Abi) -> Iterator[_Instruction]:
    """Yield (code, jump if true, jump if false, constant) for the whole filter."""
    unknown = _refuse(errno.ENOSYS)
    yield _load(_ARCH_AT)
    yield _EQUAL, 1, 0, abi.arch
    yield unknown
    yield _load(_NUMBER_AT)
    yield _ABOVE, 0, 1, _NEWEST  # the numbers of x32 are above it too
    yield unknown
    yield _EQUAL, 0, 1, _CLONE3
    yield unknown
    for number in sorted(abi.refused.values()):
        yield _EQUAL, 0, 1, number
        yield _refuse(errno.EPERM)
    for number in (abi.socket, abi.socketpair):
        yield from _only(number, _FAMILIES)
    yield from _only(abi.personality, _PERSONAS)
    yield _EQUAL, 0, 4, abi.clone
    yield _load(_ARGS_AT)
    yield _ANY_BIT, 0, 1, _NAMESPACES
    yield _refuse(errno.EPERM)
    yield _load(_NUMBER_AT)
    yield _EQUAL, 0, 1 + 2 * len(_TERMINAL_INPUT), abi.ioctl
    yield _load(_ARGS_AT + 8)
    for request in _TERMINAL_INPUT:
        yield _EQUAL, 0, 1, request
        yield _refuse(errno.EPERM)
    yield _RETURN, 0, 0, _ALLOW


def _only(number: int, values: tuple[int, ...]) -> Iterator[_Instruction]:
    """Refuse a call unless its first argument (its lower 32 bits) is one of the values."""
    yield _EQUAL, 0, len(values) + 3, number
    yield _load(_ARGS_AT)
    for i, value in enumerate(values):
        yield _EQUAL, len(values) - i, 0, value
    yield _refuse(errno.EPERM)
    yield _load(_NUMBER_AT)


def _load(offset: int) -> _Instruction:
    return _LOAD, 0, 0, offset


def _refuse(code: int) -> _Instruction:
    return _RETURN, 0, 0, _ERRNO | code
