"""Common tensor operations of the channels: raw bytes, names of dtypes, buckets on the host.

Takes: tensors, one by one. Gives: views, bounded lists and blocks of them. Never: holds more than
two buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch

Tensors = Iterable[tuple[str, torch.Tensor]]
Row = tuple[str, str, list[int], int]
"""Name, dtype, shape, offset of one tensor in a block of bytes."""


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes ``[nbytes]`` of a contiguous tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name.

    Raises:
        ValueError: If torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def view(block: torch.Tensor, row: Row) -> torch.Tensor:
    """Return a tensor in a block of bytes ``[n]``, without a copy."""
    _, name, shape, offset = row
    dtype = dtype_of(name)
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype, device=block.device)
    return block[offset : offset + num_bytes].view(dtype).view(shape)


def buckets(tensors: Tensors, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of contiguous CPU tensors of at most ``bucket_bytes`` (at least one tensor)."""
    for bucket in _lists(tensors, bucket_bytes):
        yield _on_host(bucket)


def blocks(tensors: Tensors, bucket_bytes: int) -> Iterator[tuple[list[Row], torch.Tensor]]:
    """Yield the tensors in blocks of bytes ``[n]`` on the host, without gaps.

    This is the only copy on the host. A block contains tensors of one dtype, so that each of them
    is aligned. From a CUDA device, one block is copied while the tensors of the next are gathered.
    """
    started: _Copy | None = None
    for bucket in _lists(tensors, bucket_bytes, one_dtype=True):
        copy = _Copy(bucket)
        if started is not None:
            yield started.rows, started.done()
        started = copy
    if started is not None:
        yield started.rows, started.done()


class _Copy:
    """The copy of one bucket into a block, which continues in the background on CUDA."""

    def __init__(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.rows: list[Row] = []
        size = 0
        for name, tensor in bucket:
            self.rows.append((name, dtype_name(tensor.dtype), list(tensor.shape), size))
            size += tensor.nbytes
        is_cuda = any(tensor.is_cuda for _, tensor in bucket)
        self._block = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
        self._bucket = bucket
        self._stream: Any = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._stream is None:
            self._begin()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._begin()

    def _begin(self) -> None:
        for (_, tensor), row in zip(self._bucket, self.rows, strict=True):
            view(self._block, row).copy_(tensor, non_blocking=True)

    def done(self) -> torch.Tensor:
        """Wait for the copy, and return the block."""
        if self._stream is not None:
            self._stream.synchronize()
        self._bucket = ()  # the tensors must exist until here
        return self._block


def _lists(
    tensors: Tensors, bucket_bytes: int, *, one_dtype: bool = False
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of at most ``bucket_bytes`` (at least one tensor)."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        is_other = one_dtype and bucket and bucket[-1][1].dtype != tensor.dtype
        if bucket and (is_other or size + tensor.nbytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _on_host(bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Copy tensors from a device asynchronously, with one synchronization."""
    if not any(t.is_cuda for _, t in bucket):
        return [(name, t.to("cpu").contiguous()) for name, t in bucket]
    copies = []
    for name, tensor in bucket:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append((name, there.copy_(tensor, non_blocking=True)))
    torch.cuda.synchronize()
    return copies
