"""Records that are stored once and read by several workers, such as a batch for trainer ranks.

    pack(records) --> one file (or one object of a cluster) <-- each reader maps it

A record is pickled with its arrays out of band (PEP 574): readers share the arrays' memory, and the
pages that a reader does not use are never copied.

Takes: picklable records. Gives: an argument for a worker's call, which the worker's process
replaces by the records. Never: pickles several records in one uninterrupted step, because a large
one would block the event loop of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rollart_core.errors import RollartError

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
"""Of arrays, in bytes; enough for all vector instructions."""

Buffer: TypeAlias = bytes | memoryview


class StoredRecords(ABC):
    """A reference to stored records, as an argument of a worker's call."""

    @abstractmethod
    def load(self) -> list[Any]:
        """Return the records, in order. Their arrays are read-only."""


StoreRecords: TypeAlias = Callable[[Sequence[Any]], AbstractAsyncContextManager[StoredRecords]]
"""Stores records until the end of the block."""


@dataclass(frozen=True, slots=True)
class RecordFile(StoredRecords):
    """Records in a file, for workers on this machine."""

    path: str

    def load(self) -> list[Any]:
        """See :meth:`StoredRecords.load`; the file can be removed afterwards."""
        with open(self.path, "rb") as file:
            return unpack(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def file_store(folder: Path) -> StoreRecords:
    """Return a store of records in files of a folder, which is created if necessary."""

    @contextlib.asynccontextmanager
    async def store(records: Sequence[Any]) -> AsyncIterator[StoredRecords]:
        path = await asyncio.to_thread(_write, folder, records)
        try:
            yield RecordFile(str(path))
        finally:
            path.unlink(missing_ok=True)

    return store


def _write(folder: Path, records: Sequence[Any]) -> Path:
    """Write records to a new file.

    Raises:
        RollartError: If the file cannot be written, for example because the folder is full.
    """
    path = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix="records-", dir=folder)
        path = Path(name)
        with os.fdopen(fd, "wb") as file:
            for part in pack(records):
                file.write(part)
    except OSError as e:
        if path is not None:
            path.unlink(missing_ok=True)
        raise RollartError(
            f"a batch cannot be written to {folder}: {e.strerror or e}; it needs room for one "
            "batch of trajectories"
        ) from e
    return path


def pack(records: Sequence[Any]) -> Iterator[Buffer]:
    """Yield the parts of the stored form, in order: records with their arrays, then an index."""
    index: list[list[tuple[int, int]]] = []
    end = 0
    for record in records:
        arrays: list[pickle.PickleBuffer] = []
        body = pickle.dumps(record, protocol=5, buffer_callback=arrays.append)
        places = []
        for part in (memoryview(body), *(array.raw() for array in arrays)):
            padding = -end % _ALIGNMENT
            yield bytes(padding)
            yield part
            places.append((end + padding, end + padding + part.nbytes))
            end += padding + part.nbytes
        index.append(places)
    said = pickle.dumps(index, protocol=5)
    yield said
    yield _LENGTH.pack(len(said))


def unpack(content: Any) -> list[Any]:
    """Return the records of a stored form; their arrays are views of ``content``.

    Args:
        content: An object with a contiguous buffer of bytes, which the arrays keep alive.
    """
    view = memoryview(content).cast("B").toreadonly()
    (length,) = _LENGTH.unpack(view[-_LENGTH.size :])
    index = pickle.loads(view[-_LENGTH.size - length : -_LENGTH.size])
    return [
        pickle.loads(view[slice(*body)], buffers=[view[slice(*place)] for place in arrays])
        for body, *arrays in index
    ]
