"""Weights through memory that the processes of one machine share.

A version is one file in a folder under ``/dev/shm`` (or any folder, such as a temporary one on
macOS): a JSON index, then the raw tensors. Readers map the file, so nothing is copied; a mapping
stays good after the file has been pruned. The layout::

    8 bytes   length of the index, little-endian
    index     JSON: [[name, dtype, shape, offset], ...]; offsets count from the start of the file
    tensors   each at a multiple of 64 bytes
"""

from __future__ import annotations

import json
import math
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from rollart_plugins.weights.folder import FolderChannel, Tensors

_ALIGN = 64


class SharedMemoryChannel(FolderChannel):
    """Memory shared by the processes of one machine."""

    suffix = ".shm"

    def _write(self, path: Path, tensors: Tensors) -> int:
        items = [(name, t.detach().to("cpu").contiguous()) for name, t in tensors]
        index, size = _layout(items)
        with path.open("wb") as file:
            file.write(len(index).to_bytes(8, "little") + index)
            for (_, tensor), offset in zip(items, _offsets(index), strict=True):
                file.seek(offset)
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.truncate(size)
        return sum(t.nbytes for _, t in items)

    def _read(self, path: Path) -> Tensors:
        with path.open("rb") as file:
            # A private copy-on-write mapping: torch wants writable memory, and no write of a
            # reader ever reaches another.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return _tensors(memory)


def default_folder() -> Path:
    """Return the folder for shared memory: ``/dev/shm``, or the temporary folder without one."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def _layout(items: list[tuple[str, torch.Tensor]]) -> tuple[bytes, int]:
    """Return the index and the size of the whole file."""
    # Offsets depend on the length of the index, so its room is reserved from an upper bound.
    head = _aligned(8 + sum(len(json.dumps(n)) + 16 * t.dim() + 64 for n, t in items) + 16)
    rows, offset = [], head
    for name, tensor in items:
        rows.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        offset = _aligned(offset + tensor.nbytes)
    index = json.dumps(rows).encode()
    assert 8 + len(index) <= head
    return index, offset


def _offsets(index: bytes) -> list[int]:
    return [row[3] for row in json.loads(index)]


def _tensors(memory: mmap.mmap) -> Iterator[tuple[str, torch.Tensor]]:
    length = int.from_bytes(memory[:8], "little")
    for name, dtype_name, shape, offset in json.loads(memory[8 : 8 + length]):
        dtype, count = getattr(torch, dtype_name), math.prod(shape)
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        else:
            flat = torch.empty(0, dtype=dtype)
        yield name, flat.view(shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
