"""Weights in memory that the processes of one machine share.

A version is one file in a folder under ``/dev/shm`` (or any other folder, such as a temporary one
on macOS): the raw tensors, then a JSON index. Readers map the file, so nothing is copied. A mapping
stays valid after the file is removed. The layout::

    8 bytes   a mark, written last: without it, the file is incomplete
    8 bytes   offset of the index, little-endian; the index extends to the end of the file
    tensors   each at a multiple of 64 bytes
    index     JSON: [[name, dtype, shape, offset], ...]; offsets count from the start of the file
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from rollart_plugins.weights.folder import FolderChannel
from rollart_plugins.weights.tensors import (
    Row,
    Tensors,
    aligned,
    buckets,
    dtype_name,
    raw,
    view,
)

_MARK = b"RAWEIGHT"


class SharedMemoryChannel(FolderChannel):
    """Weights in memory that the processes of one machine share."""

    suffix = ".shm"

    def _write(self, policy_version: int, path: Path, tensors: Tensors) -> int:
        rows: list[Row] = []
        offset, num_bytes = aligned(16), 0
        with path.open("wb") as file:
            for bucket in buckets(tensors, self._bucket_bytes):
                for name, tensor in bucket:
                    rows.append((name, dtype_name(tensor.dtype), list(tensor.shape), offset))
                    file.seek(offset)
                    file.write(raw(tensor).numpy().data)
                    num_bytes += tensor.nbytes
                    offset = aligned(offset + tensor.nbytes)
            file.seek(offset)
            file.write(json.dumps(rows).encode())
            file.seek(0)
            file.write(_MARK + offset.to_bytes(8, "little"))
        return num_bytes

    def _read(self, path: Path) -> Tensors:
        with path.open("rb") as file:
            head = file.read(16)
            if head[:8] != _MARK:
                raise ValueError(f"{path} is damaged: it is not a complete weight file")
            # A private copy-on-write mapping: torch requires writable memory, and writes of a
            # reader must not be visible to others.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            rows: list[Row] = json.loads(memory[int.from_bytes(head[8:], "little") :])
        except ValueError as e:
            raise ValueError(f"{path} is damaged: its index is not readable") from e
        return _tensors(memory, rows)


def _tensors(memory: mmap.mmap, rows: list[Row]) -> Iterator[tuple[str, torch.Tensor]]:
    block = torch.frombuffer(memory, dtype=torch.uint8)
    for row in rows:
        yield row[0], view(block, row)
