"""Common tensor operations of the channels: raw bytes, names of dtypes, buckets on the host.

Takes: tensors, one by one. Gives: views and bounded lists of them. Never: holds more than one
bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

Tensors = Iterable[tuple[str, torch.Tensor]]
Row = tuple[str, str, list[int], int]
"""Name, dtype, shape, offset of one tensor in a block of bytes."""

ALIGN = 64


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


def aligned(offset: int) -> int:
    """Return the next multiple of 64."""
    return -(-offset // ALIGN) * ALIGN


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
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield _on_host(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    if bucket:
        yield _on_host(bucket)


def pack(bucket: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Row], torch.Tensor]:
    """Copy the tensors of a bucket into one block of bytes, each at a multiple of 64."""
    rows: list[Row] = []
    size = 0
    for name, tensor in bucket:
        rows.append((name, dtype_name(tensor.dtype), list(tensor.shape), size))
        size = aligned(size + tensor.nbytes)
    block = torch.zeros(size, dtype=torch.uint8)
    for (_, tensor), row in zip(bucket, rows, strict=True):
        if tensor.nbytes:
            block[row[3] : row[3] + tensor.nbytes].copy_(raw(tensor))
    return rows, block


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
