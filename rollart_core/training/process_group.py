"""The process group of trainer ranks: rendezvous and shutdown.

Takes: a rank, the number of ranks, and the address of rank 0's store. Gives: torch.distributed's
default process group (gloo on the CPU, NCCL on CUDA). Never: chooses the number of ranks, or ends a
process.
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
"""Timeout of the rendezvous, and of collective calls unless the config sets another. Only a rank
that hangs reaches it: a rank that dies is detected immediately."""

_SIOCGIFADDR = 0x8915
"""Linux's ioctl request for the address of an interface."""

_stores: list[Any] = []
"""The store that this process serves to all ranks, from :func:`open_store` to :func:`leave`."""


def open_store(host: str | None = None) -> str:
    """Serve a store at a free port of this machine; call it in rank 0's process.

    Args:
        host: A name or address of this machine. If None, its address for other machines.

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
    """Join the group and wait until all ranks have joined.

    Args:
        store: The address that :func:`open_store` returned.
        rank: The rank of this process.
        world_size: The number of ranks.
        device: ``cpu``, ``cuda`` or ``auto``.
        timeout_s: Timeout of a collective call, in seconds.
        own_devices: Whether this process sees only its own devices; else all ranks share the
            devices of this machine.

    Raises:
        ConfigError: If the ranks share the devices of a machine that has too few of them.
    """
    host, _, port = store.rpartition(":")
    _talk_over(host if host.startswith("127.") else own_address())
    meeting = _stores[0] if rank == 0 else _store(host, int(port))
    # Ranks may join late, because each imports torch first. Later calls have their own timeout.
    meeting.set(f"here/{rank}", "")
    meeting.wait([f"here/{r}" for r in range(world_size)], timedelta(seconds=TIMEOUT_S))
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if use_cuda:
        num_devices = torch.cuda.device_count()
        if not own_devices and world_size > num_devices:
            raise ConfigError(
                f"runtime.num_trainer_ranks: {world_size} ranks on CUDA need one device each, but "
                f"this machine has {num_devices}: lower runtime.num_trainer_ranks"
            )
        torch.cuda.set_device(rank % num_devices)
    dist.init_process_group(
        # Checkpoints and counters gather on the CPU, so the group has gloo besides NCCL.
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=meeting,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def leave() -> None:
    """Leave the group; may be called twice, or without a group."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _stores.clear()


def own_address() -> str:
    """Return this machine's address for other machines (loopback if it has no other)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only selects an interface
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
    """Make gloo use the interface of this address instead of that of the machine's host name."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no address, or this is not Linux
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return
