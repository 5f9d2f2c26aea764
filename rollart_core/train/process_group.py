"""The process group of trainer ranks: how they find each other, and how they part.

Takes: a rank, how many there are, and the address of rank 0's store. Gives: torch.distributed's
default process group (gloo on the CPU, NCCL on CUDA). Never: decides how many ranks there are, or
ends a process.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_stores: list[Any] = []
"""The store that this process serves to all ranks, from :func:`open_store` to :func:`join`."""


def open_store(host: str | None = None, timeout_s: float = 300.0) -> str:
    """Serve a store at a free port of this machine; called in rank 0's process.

    Args:
        host: A name or address of this machine; None: the one by which others reach it.
        timeout_s: How long the ranks wait for each other.

    Returns:
        ``host:port``.
    """
    host = host or own_address()
    store = _store(host, 0, timeout_s, is_master=True)
    _stores[:] = [store]
    return f"{host}:{store.port}"


def join(store: str, rank: int, world_size: int, device: str, timeout_s: float = 300.0) -> None:
    """Join the group and wait until all ranks have.

    Args:
        store: Where :func:`open_store` said it is.
        rank: This process's.
        world_size: How many ranks there are.
        device: ``cpu``, ``cuda`` or ``auto``.
        timeout_s: A collective call that takes longer fails.
    """
    host, _, port = store.rpartition(":")
    _stay_on_this_machine(host)
    meeting = _stores[0] if rank == 0 else _store(host, int(port), timeout_s)
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if use_cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
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


def _store(host: str, port: int, timeout_s: float, *, is_master: bool = False) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _stay_on_this_machine(host: str) -> None:
    """Let ranks that meet on loopback talk over loopback, whatever this machine's name means."""
    if not host.startswith("127."):
        return
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
