"""A separate process group for one set of members: the trainer and engines or vLLM's processes.

Takes: a store, the members, a timeout. Gives: broadcasts from rank 0. Never: uses the default
process group (the trainer's ranks have their own), waits longer than the timeout, or imports
anything except torch: vLLM imports this file alone (:class:`VllmReceiver`).

A group is never repaired. After any failure it is aborted, and the next set gets a new group.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # its exports are not typed

_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Each NCCL group reads it once. 2: abort the communicators only, not the process."""

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Membership:
    """The name and size of a group, and the rank of this member."""

    name: str
    """Unique within a store."""
    rank: int
    size: int


class BroadcastGroup:
    """One process group.

    Args:
        store: Store in which its members find each other; see :func:`open_store`.
        member: The membership of this process.
        backend: ``gloo`` or ``nccl``.
        host: Address of this process from the other members' point of view.
        timeout_s: Maximum time to join, and for each broadcast.

    Raises:
        RuntimeError: If not all members join in time.
    """

    def __init__(
        self, store: Any, member: Membership, backend: str, host: str, timeout_s: float
    ) -> None:
        self.member = member
        self._limit = timedelta(seconds=timeout_s)
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        make: Any = _nccl if backend == "nccl" else _gloo
        self._group: Any = make(_keys(store, member.name, self.device), member, host, self._limit)

    def broadcast(self, block: torch.Tensor) -> None:
        """Send (rank 0) or receive raw bytes ``[n]``.

        Raises:
            RuntimeError: If a member has ended or is too slow.
        """
        group = self._group
        if group is None:
            raise RuntimeError("the process group was aborted")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._limit
        group.broadcast([block], options).wait(self._limit)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def abandon(self) -> None:
        """Abort the group, even during a broadcast; the other members see closed connections."""
        group, self._group = self._group, None
        with contextlib.suppress(RuntimeError, AttributeError):
            group.abort()


def open_store(host: str, port: int | None, timeout_s: float) -> tuple[Any, int]:
    """Return the store in which members find each other, and its port.

    Args:
        host: Address of the trainer.
        port: Port to connect to. None: serve the store, on ``host`` only.
        timeout_s: Maximum time to wait.
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
        master_listen_fd=listener.detach(),  # otherwise it would listen on all interfaces
    )
    return store, free


def _keys(store: Any, name: str, device: torch.device) -> Any:
    """Return the part of a store in which ``init_process_group`` of torch 2 finds a group.

    Inference servers join with it. It is not used here, because it would split an NCCL group from
    the trainer's own one.
    """
    named = dist.PrefixStore(name, store)
    return dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", named))


def _gloo(store: Any, member: Membership, host: str, limit: timedelta) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = limit
    return kind(store, member.rank, member.size, options)


def _nccl(store: Any, member: Membership, host: str, limit: timedelta) -> Any:
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None or not torch.cuda.is_available():
        raise RuntimeError("backend nccl requires CUDA on every member; backend: gloo does not")
    options = kind.Options()
    options._timeout = limit
    with _only_aborts():
        return kind(store, member.rank, member.size, options)


@contextlib.contextmanager
def _only_aborts() -> Iterator[None]:
    """Configure groups that are made in this block to abort only themselves if a member ends.

    By default, NCCL's watchdog then ends the process, which is a trainer that can continue without
    the engine.
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


class VllmReceiver:
    """Methods for the processes of a vLLM server (``--worker-extension-cls``).

    vLLM calls them with ``/collective_rpc``, and adds them to its own class of workers.
    """

    rank: int
    """Rank among the server's processes."""
    rollart_group: BroadcastGroup | None = None

    def rollart_receive(
        self,
        place: Mapping[str, Any],
        buckets: Sequence[Sequence[Sequence[Any]]],
        with_tied_head: bool,
    ) -> None:
        """Receive a broadcast, and load its tensors.

        Args:
            place: ``host`` and ``port`` of the store, ``group``, ``backend``, ``first_rank`` and
                ``num_ranks`` of a broadcast, and ``timeout_s``.
            buckets: Name, dtype and shape of the tensors in each block.
            with_tied_head: See :func:`with_head`.

        Raises:
            RuntimeError: If a member ends or is too slow.
        """
        member = Membership(place["group"], place["first_rank"] + self.rank, place["num_ranks"])
        try:
            group = self.rollart_group
            if group is None or group.member != member:
                self.rollart_leave()
                group = self.rollart_group = _joined(place, member)
            tensors = _received(group, buckets)
            worker: Any = self
            worker.reload_weights(
                weights_iterator=with_head(tensors) if with_tied_head else tensors
            )
        except BaseException:
            self.rollart_leave()
            raise

    def rollart_leave(self) -> None:
        """Leave the group."""
        group, self.rollart_group = self.rollart_group, None
        if group is not None:
            group.abandon()


def _joined(place: Mapping[str, Any], member: Membership) -> BroadcastGroup:
    host, port, timeout_s = place["host"], place["port"], place["timeout_s"]
    store, _ = open_store(host, port, timeout_s)
    with socket.create_connection((host, port), timeout_s) as connection:
        mine = connection.getsockname()[0]
    return BroadcastGroup(store, member, place["backend"], mine, timeout_s)


def _received(
    group: BroadcastGroup, buckets: Sequence[Sequence[Sequence[Any]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in buckets:
        ends = list(accumulate(prod(shape) * _dtype(name).itemsize for _, name, shape in bucket))
        block = torch.empty(ends[-1], dtype=torch.uint8, device=group.device)
        group.broadcast(block)
        for (name, dtype, shape), start, end in zip(bucket, [0, *ends], ends, strict=False):
            yield name, block[start:end].view(_dtype(dtype)).view(shape)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def with_head(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors and, if the output head is not among them, the embedding as the head.

    On a CPU, vLLM 0.32 keeps a packed copy of a tied head, which it only replaces if it gets one.
    """
    embedding, has_head = None, False
    for name, tensor in tensors:
        yield name, tensor
        has_head |= name == _HEAD
        embedding = tensor if name.endswith(_EMBEDDING) else embedding
    if embedding is not None and not has_head:
        yield _HEAD, embedding
