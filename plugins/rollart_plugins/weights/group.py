"""A process group of its own for one set of ends: the trainer's and some engines'.

Takes: a store, who is in it, a timeout. Gives: broadcasts from rank 0. Never: touches the default
process group (the trainer's ranks have theirs), or waits longer than the timeout.

A group is never mended: when anything fails in it, it is given up, and the next set gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # what it exports is not typed

_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Read once by each group of NCCL's; 2: abort its communicators, and end nothing else."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Which group, and this end's place in it."""

    name: str
    """No two groups of one store have the same."""
    rank: int
    size: int


class BroadcastGroup:
    """One process group.

    Args:
        store: Where its members find one another; see :func:`open_store`.
        member: This end's place.
        backend: ``gloo`` or ``nccl``.
        host: This end's address as the others see it.
        timeout_s: Of joining, and of each broadcast.

    Raises:
        RuntimeError: When not all join in time.
    """

    def __init__(
        self, store: Any, member: Membership, backend: str, host: str, timeout_s: float
    ) -> None:
        self.member = member
        self._limit = timedelta(seconds=timeout_s)
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        prefix = dist.PrefixStore(f"weights/{member.name}", store)
        make: Any = _nccl if backend == "nccl" else _gloo
        self._group: Any = make(prefix, member, host, self._limit)

    def broadcast(self, block: torch.Tensor) -> None:
        """Send (rank 0) or receive raw bytes ``[n]``.

        Raises:
            RuntimeError: When a member is gone or too slow.
        """
        group = self._group
        if group is None:
            raise RuntimeError("the group was given up")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._limit
        group.broadcast([block], options).wait(self._limit)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def abandon(self) -> None:
        """Give it up, whatever it is doing; the others see its connections close."""
        group, self._group = self._group, None
        with contextlib.suppress(RuntimeError, AttributeError):
            group.abort()


def open_store(host: str, port: int | None, timeout_s: float) -> tuple[Any, int]:
    """Return where groups find their members, and its port.

    Args:
        host: Of the trainer's end.
        port: What to connect to; None: serve it, at ``host`` only.
        timeout_s: The longest wait.
    """
    limit = timedelta(seconds=timeout_s)
    if port is not None:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        return store, port
    listener = socket.create_server((host, 0))
    free: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        free,
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),  # by itself it would listen to every network
    )
    return store, free


def _gloo(store: Any, member: Membership, host: str, limit: timedelta) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = limit
    return kind(store, member.rank, member.size, options)


def _nccl(store: Any, member: Membership, host: str, limit: timedelta) -> Any:
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None or not torch.cuda.is_available():
        raise RuntimeError("backend nccl needs CUDA on every end; backend: gloo does not")
    options = kind.Options()
    options._timeout = limit
    with _only_aborts():
        return kind(store, member.rank, member.size, options)


@contextlib.contextmanager
def _only_aborts() -> Iterator[None]:
    """Let a group that is made meanwhile end only itself when a member is gone.

    By default NCCL's watchdog then ends the process: here, a trainer that can do without an engine.
    """
    before = os.environ.get(_ON_ERROR)
    os.environ[_ON_ERROR] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ON_ERROR]
        else:
            os.environ[_ON_ERROR] = before
