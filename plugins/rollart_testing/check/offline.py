"""Run a process without a network, in a separate network namespace if Linux allows it.

Takes: nothing. Gives: a command prefix, and a function that turns on the loopback inside. Never:
changes the network of this process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from functools import cache
from typing import Final

_GET_FLAGS: Final = 0x8913  # SIOCGIFFLAGS
_SET_FLAGS: Final = 0x8914  # SIOCSIFFLAGS
_UP: Final = 0x1


@cache
def prefix() -> tuple[tuple[str, ...], str]:
    """Return the prefix that runs a command without a network, or why there is none."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return (), "this system has no `unshare` command to turn the network off"
    own = (unshare, "-n") if os.geteuid() == 0 else (unshare, "-rn")
    done = subprocess.run([*own, "true"], capture_output=True, check=False, timeout=30)
    if done.returncode != 0:
        return (), f"`{' '.join(('unshare', *own[1:]))}` is not allowed here"
    return own, ""


def bring_loopback_up() -> None:
    """Turn on the loopback of a new network namespace; an environment's local servers need it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = b"lo".ljust(16, b"\0")
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, name + bytes(24))
        (flags,) = struct.unpack_from("h", answer, 16)
        request = name + struct.pack("h", flags | _UP) + bytes(22)
        fcntl.ioctl(any_socket, _SET_FLAGS, request)
