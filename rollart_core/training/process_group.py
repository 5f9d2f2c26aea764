"""The process group of trainer ranks: how they find each other, and how they part.

Takes: a rank, how many there are, and the address of rank 0's store. Gives: torch.distributed's
default process group (gloo on the CPU, NCCL on CUDA). Never: decides how many ranks there are, or
ends a process.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollart_core.errors import ConfigError

TIMEOUT_S = 600.0
"""Of calls among ranks, unless the config says otherwise, and of their meeting. Only a rank that
hangs takes so long: one that dies is noticed at once."""

_SIOCGIFADDR = 0x8915
"""What Linux is asked for the address of an interface."""

_stores: list[Any] = []
"""The store that this process serves to all ranks, from :func:`open_store` to :func:`join`."""


def open_store(host: str | None = None) -> str:
    """Serve a store at a free port of this machine; called in rank 0's process.

    Args:
        host: A name or address of this machine; None: the one by which others reach it.

    Returns:
        ``host:port``.
    """
    host = host or own_address()
    store = _store(host, 0, is_master=True)
    _stores[:] = [store]
    return f"{host}:{store.port}"


def join(
    store: str,
    rank: int,
    world_size: int,
    *,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
    own_devices: bool = False,
) -> None:
    """Join the group and wait until all ranks have.

    Args:
        store: Where :func:`open_store` said it is.
        rank: This process's.
        world_size: How many ranks there are.
        device: ``cpu``, ``cuda`` or ``auto``.
        timeout_s: A collective call that takes longer fails.
        own_devices: Whether this process sees the devices that it has, and no others; else all
            ranks share those of this machine.

    Raises:
        ConfigError: When the ranks share the devices of a machine that has too few of them.
    """
    host, _, port = store.rpartition(":")
    _talk_over(host if host.startswith("127.") else own_address())
    meeting = _stores[0] if rank == 0 else _store(host, int(port))
    # Some come late: each imports torch at its own pace. Later calls have a limit of their own.
    meeting.set(f"here/{rank}", "")
    meeting.wait([f"here/{r}" for r in range(world_size)], timedelta(seconds=TIMEOUT_S))
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if use_cuda:
        num_devices = torch.cuda.device_count()
        if not own_devices and world_size > num_devices:
            raise ConfigError(
                f"runtime.num_trainer_ranks: {world_size} ranks on CUDA need a device each; this "
                f"machine has {num_devices}"
            )
        torch.cuda.set_device(rank % num_devices)
    dist.init_process_group(
        # Checkpoints and counters gather on the CPU, so gloo is there beside NCCL.
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=meeting,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def leave() -> None:
    """Leave the group; may be called twice, or without one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _stores.clear()


def own_address() -> str:
    """Return the address by which other machines reach this one (loopback when it has no other)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks which interface would be taken
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _store(host: str, port: int, *, is_master: bool = False) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def _talk_over(address: str) -> None:
    """Let gloo take the interface of this address: it would take what this machine's name means."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none; or not on Linux
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return
