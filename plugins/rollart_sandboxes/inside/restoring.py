"""Bringing the writable folders of a box back to what was noted.

Takes: notes, and records of an archive. Gives: the folders as they were: what bears its note stays,
all else is removed and unpacked again. Never: follows a symlink.
"""

from __future__ import annotations

import os
import stat

from rollart_sandboxes.inside.contents import digest
from rollart_sandboxes.inside.tree import Folders, Note, every, find, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Tuple


class Restoring:
    """Bringing the folders back to what was noted.

    ``compare -> place for each record of what is wanted -> settle``.
    """

    def __init__(self, roots: List[str], notes: Dict[str, Note]) -> None:
        self.folders = Folders(roots)
        self.notes = notes
        self.wanted: List[Note] = []
        self.relinked: List[str] = []

    def wipe(self) -> None:
        """Remove everything, so that everything is wanted."""
        for number, root in enumerate(self.folders.roots):
            if os.path.isdir(root):
                fd = self.folders.change(str(number))
                for name in os.listdir(fd):
                    remove(fd, name)

    def compare(self) -> List[List[int]]:
        """Remove what differs; return which parts of the archive bring it back: start, length."""
        left = list(self.notes.items())[::-1]
        for number, note in left:
            found = os.fstat(self.folders.open(number))
            if found.st_ctime_ns != note.ctime_ns:
                self.folders.changed.add(number)
        while left:
            path, note = left.pop()
            self.compare_folder(path, note.names or {}, left)
        spans: List[List[int]] = []
        for note in sorted(self.wanted, key=lambda n: n.at):
            if spans and sum(spans[-1]) == note.at:
                spans[-1][1] += note.length
            else:
                spans.append([note.at, note.length])
        return spans

    def compare_folder(
        self, path: str, names: Dict[str, Note], left: List[Tuple[str, Note]]
    ) -> None:
        """Compare what is in one folder; folders in it that remain are added to ``left``."""
        fd = self.folders.open(path)
        here: Any = names
        if path in self.folders.changed:  # else it holds the same names
            here = set(os.listdir(fd))
            for name in here.difference(names):
                remove(self.folders.change(path), name)
        look = os.stat
        for name, note in names.items():
            if name not in here:
                self.folders.change(path)
                self.want(note)
                continue
            found = look(name, dir_fd=fd, follow_symlinks=False)
            same = found.st_ctime_ns == note.ctime_ns and found.st_ino == note.inode
            same = same and (not note.digest or holds(fd, name, note, found))
            if note.names is not None and stat.S_ISDIR(found.st_mode):
                below = path + "/" + name
                if not same:
                    self.folders.changed.add(below)
                self.folders.unlock(below, found, name, fd)
                left.append((below, note))
            elif not same and not self.left_alone(note, found):
                remove(self.folders.change(path), name)
                self.want(note)

    def left_alone(self, note: Note, found: os.stat_result) -> bool:
        """Whether this is a folder of somebody else's, as it was."""
        return note.foreign and stat.S_ISDIR(found.st_mode) and found.st_uid != os.getuid()

    def want(self, note: Note) -> None:
        """Want a path and all below it; sockets cannot be had again."""
        self.wanted += [n for n in every({"": note}) if n.length]

    def place(self, header: Any, body: Iterator[bytes]) -> None:
        """Make one path again."""
        path, kind, mode, mtime_ns, more = header
        parent, _, name = path.rpartition("/")
        if kind == "d":
            self.note_folder(path, parent, name, Note(mode, mtime_ns))
            self.folders.changed.add(path)
            if parent:
                os.mkdir(name, 0o700, dir_fd=self.folders.change(parent))
            return
        fd = self.folders.change(parent)
        if kind == "h":
            self.link(fd, name, more)
            self.relinked += [path, more]
            note, first = find(self.notes, path), find(self.notes, more)
            if note is not None and first is not None:
                note.digest = first.digest
            return
        if kind == "f":
            self.write_file(fd, path, mode, more, body)
        elif kind == "l":
            os.symlink(more, name, dir_fd=fd)
        elif kind == "p":
            os.mkfifo(name, 0o600, dir_fd=fd)
            os.chmod(name, mode, dir_fd=fd)
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=fd, follow_symlinks=False)
        self.note(fd, name, path)

    def note_folder(self, path: str, parent: str, name: str, note: Note) -> None:
        """Note a folder's mode and time where nothing was noted."""
        if find(self.notes, path) is None:
            note.names = {}
            above = find(self.notes, parent)
            (self.notes if above is None or above.names is None else above.names)[name] = note

    def link(self, fd: int, name: str, first: str) -> None:
        parent, _, target = first.rpartition("/")
        here = os.dup(fd)
        try:
            there = self.folders.open(parent)
            os.link(target, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        finally:
            os.close(here)

    def write_file(self, fd: int, path: str, mode: int, more: Any, body: Iterator[bytes]) -> None:
        """Write a new file, and note the digest of what is in it now where one was noted."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path.rpartition("/")[2], flags, 0o600, dir_fd=fd)
        try:
            fill(handle, more, body)
            note = find(self.notes, path)
            if note is not None and note.digest:
                note.digest = digest(handle, os.fstat(handle))
            os.fchmod(handle, mode)
        finally:
            os.close(handle)

    def note(self, fd: int, name: str, path: str) -> None:
        note = find(self.notes, path)
        if note is not None:
            self.folders.note(note, os.stat(name, dir_fd=fd, follow_symlinks=False))

    def settle(self) -> None:
        """Finish folders and links, once everything is in its place."""
        for path in self.relinked:
            parent, _, name = path.rpartition("/")
            self.note(self.folders.open(parent), name, path)
        self.folders.settle(self.notes)


def holds(fd: int, name: str, note: Note, found: os.stat_result) -> bool:
    """Whether a file holds the bytes that were noted.

    Who may not read a file cannot map it, and leave to do so would have set its change time.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, dir_fd=fd)
    except PermissionError:
        return True
    try:
        return digest(handle, found) == note.digest
    finally:
        os.close(handle)


def fill(handle: int, more: Any, body: Iterator[bytes]) -> None:
    """Give a new file its size, and the spans of it that come."""
    size, spans = more
    data = memoryview(b"")
    for start, length in spans:
        while length:
            data = data if data else memoryview(next(body, b""))
            if not data:
                raise EOFError("a file is longer than its record")
            done = os.pwrite(handle, data[:length], start)
            data, start, length = data[done:], start + done, length - done
    os.ftruncate(handle, size)
