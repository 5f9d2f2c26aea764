"""Packing the writable folders of a box into an archive.

Takes: folders. Gives: pieces of bytes, and notes of what was packed. Never: packs holes, sockets,
or what somebody else keeps shut.

An archive is records one after another: two lengths (u32 header, u64 body, big endian), a JSON
header ``[path, kind, mode, mtime_ns, more]``, raw bytes. A path starts with the number of its
folder. ``more`` is the target of a link, or the size of a file and where its bytes lie in it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct

from rollart_sandboxes.inside.contents import CHUNK, Telling, data_spans, hasher, span
from rollart_sandboxes.inside.tree import Folders, Note, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Generator, Iterator, List, Tuple

RECORD = struct.Struct(">IQ")
MOST_LEVELS = 1000


class Packing:
    """One archive in the making: iterate over it for its pieces; ``notes`` is then complete."""

    def __init__(self, roots: List[str]) -> None:
        self.folders = Folders(roots)
        self.telling = Telling()
        self.notes: Dict[str, Note] = {}
        self.num_notes = self.at = 0
        self.links: Dict[Tuple[int, int], str] = {}

    def __iter__(self) -> Iterator[bytes]:
        whole = bytearray()
        for piece in self.pieces():
            self.at += len(piece)
            whole += piece
            if len(whole) >= CHUNK:
                yield bytes(whole)
                whole.clear()
        yield bytes(whole)

    def pieces(self) -> Iterator[bytes]:
        left: List[Tuple[str, Note]] = []
        for number, root in enumerate(self.folders.roots):
            if os.path.isdir(root):
                found = os.stat(root)
                note = self.noted(self.notes, str(number), found)
                left.append((str(number), note))
        left.reverse()
        try:
            while left:
                path, note = left.pop()
                if path.count("/") > MOST_LEVELS:
                    raise OSError(errno.ELOOP, f"folders more than {MOST_LEVELS} deep")
                note.names = {}
                yield from self.record(path, note, "d")
                fd = self.folders.open(path)
                for name in sorted(os.listdir(fd)):
                    below = path + "/" + name
                    if (yield from self.one(fd, name, below, note.names)):
                        left.append((below, note.names[name]))
        finally:
            self.folders.settle(self.notes)

    def noted(self, names: Dict[str, Note], name: str, found: os.stat_result) -> Note:
        note = names[name] = Note(stat.S_IMODE(found.st_mode), found.st_mtime_ns)
        self.folders.note(note, found)
        self.num_notes += 1
        return note

    def one(
        self, fd: int, name: str, path: str, names: Dict[str, Note]
    ) -> Generator[bytes, None, bool]:
        """Pack one path of a folder; return True for a folder that is to be gone into."""
        try:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        kind = stat.S_IFMT(found.st_mode)
        note = self.noted(names, name, found)
        if kind == stat.S_IFDIR:
            self.folders.unlock(path, found, name, fd)
            ours = found.st_uid == os.getuid()
            note.foreign = not ours and not os.access(name, os.R_OK | os.X_OK, dir_fd=fd)
            return not note.foreign
        first = self.links.setdefault((found.st_dev, found.st_ino), path)
        if first != path:
            known = find(self.notes, first)
            note.digest = b"" if known is None else known.digest
            yield from self.record(path, note, "h", first)
        elif kind == stat.S_IFREG:
            yield from self.file(fd, name, path, note)
        elif kind == stat.S_IFLNK:
            yield from self.record(path, note, "l", os.readlink(name, dir_fd=fd))
        elif kind == stat.S_IFIFO:
            yield from self.record(path, note, "p")
        return False

    def file(self, fd: int, name: str, path: str, note: Note) -> Iterator[bytes]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            handle = os.open(name, flags, dir_fd=fd)
        except PermissionError:
            os.chmod(name, 0o600, dir_fd=fd)
            handle = os.open(name, flags, dir_fd=fd)
        try:
            found = os.fstat(handle)
            if stat.S_IMODE(found.st_mode) != note.mode:
                os.fchmod(handle, note.mode)
            spans = data_spans(handle, found)
            length = sum(length for _, length in spans)
            yield from self.record(path, note, "f", [found.st_size, spans], length)
            telling = self.telling.of(handle, found.st_dev)
            whole = None if telling else hasher(found.st_size, spans)
            for start, length in spans:
                for data in span(handle, start, length):
                    if whole is not None:
                        whole.update(data)
                    yield data
            note.digest = b"" if whole is None else whole.digest()
            note.length = self.at - note.at
            self.folders.note(note, os.fstat(handle))
        finally:
            os.close(handle)

    def record(
        self, path: str, note: Note, kind: str, more: Any = None, length: int = 0
    ) -> Iterator[bytes]:
        header = json.dumps([path, kind, note.mode, note.mtime_ns, more]).encode()
        note.at, note.length = self.at, RECORD.size + len(header) + length
        yield RECORD.pack(len(header), length) + header


def records(read: Callable[[int], bytes]) -> Iterator[Tuple[Any, Iterator[bytes]]]:
    """Yield the header of each record and its body; a body that is left is skipped.

    Args:
        read: Returns at most so many bytes, and none only at the end.
    """

    def exactly(size: int) -> bytes:
        whole = b""
        while len(whole) < size:
            data = read(size - len(whole))
            if not data:
                raise EOFError("the archive ends within a record")
            whole += data
        return whole

    def body(size: int) -> Iterator[bytes]:
        while size:
            data = exactly(min(size, CHUNK))
            size -= len(data)
            yield data

    while True:
        begun = read(RECORD.size)
        if not begun:
            return
        head, length = RECORD.unpack(begun + exactly(RECORD.size - len(begun)))
        header = json.loads(exactly(head))
        rest = body(length)
        yield header, rest
        for _ in rest:
            pass
