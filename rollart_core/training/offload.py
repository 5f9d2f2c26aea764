"""Tensors that are moved to host memory and back, so that their device is free meanwhile.

Only the storages change: parameters, shards of FSDP2 and moments keep their identity and their
views, so the same bytes are back after a reload. On a CPU, the same is done with a copy.

Takes: tensors. Gives: free memory, then the same tensors. Never: copies two tensors of one storage
twice, or frees the host memory, which takes long to allocate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Host memory for the storages of tensors."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._free: dict[int, list[Tensor]] = {}  # by bytes

    @property
    def num_bytes(self) -> int:
        """The bytes that are in host memory now."""
        return sum(host.nbytes for _, host in self._held)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the storages of tensors to host memory; call it once until ``reload``."""
        storages = {}
        for tensor in tensors:
            storage = _own(tensor).untyped_storage()
            if not storage.resizable():  # on a CPU: memory of the file that it was loaded from
                tensor.data = tensor.detach().clone()
                storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage
        for storage in storages.values():
            host = self._host(storage.nbytes(), pinned=storage.device.type == "cuda")
            host.copy_(_as_bytes(storage), non_blocking=True)
            self._held.append((storage, host))
        _wait()
        for storage, _ in self._held:
            storage.resize_(0)

    def reload(self) -> None:
        """Move all storages back to their devices."""
        for storage, host in self._held:
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        _wait()
        for _, host in self._held:
            self._free.setdefault(host.nbytes, []).append(host)
        self._held.clear()

    def _host(self, num_bytes: int, *, pinned: bool) -> Tensor:
        if free := self._free.get(num_bytes):
            return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _own(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor."""
    detached: Any = tensor.detach()
    own: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return own


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
