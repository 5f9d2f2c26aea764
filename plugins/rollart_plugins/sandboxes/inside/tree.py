"""The writable folders of a box: packed, compared with what was packed, brought back.

Takes: folders. Gives: an archive in pieces, and notes of each path from which a later comparison
tells what has changed. Never: follows a symlink, holds a descriptor for each level of a deep tree,
or recurses.

A note holds a path's inode and change time, which no user can set, and which every change of bytes,
mode, owner, times or links sets. So what bears both is what was packed, and stays; all else is
removed and unpacked again.

An archive is records one after another: two lengths (u32 header, u64 body, big endian), a JSON
header ``[path, kind, mode, mtime_ns, more]``, raw bytes. A path starts with the number of its
folder. ``more`` is the target of a link, or the size of a file and where its bytes lie in it:
holes are not packed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Set, Tuple

CHUNK = 1 << 18
RECORD = struct.Struct(">IQ")
MOST_LEVELS = 1000
MOST_HELD = 8
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CLOCK_REALTIME_COARSE = 5  # what change times are taken from


class Note:
    """What is known of one path: where it is in the archive, and how to tell that it changed."""

    __slots__ = ("at", "ctime_ns", "foreign", "inode", "length", "mode", "mtime_ns", "names")

    def __init__(self, mode: int, mtime_ns: int) -> None:
        self.mode, self.mtime_ns = mode, mtime_ns
        self.inode = self.ctime_ns = -1
        self.at = self.length = 0
        self.names: Optional[Dict[str, Note]] = None  # what is in a folder
        self.foreign = False  # a folder of somebody else's that cannot be entered


def find(notes: Dict[str, Note], path: str) -> Optional[Note]:
    """Return the note of a path, if there is one."""
    number, *names = path.split("/")
    note = notes.get(number)
    for name in names:
        note = note.names.get(name) if note is not None and note.names is not None else None
    return note


def every(notes: Dict[str, Note]) -> Iterator[Note]:
    """Yield all notes."""
    left = list(notes.values())
    while left:
        note = left.pop()
        yield note
        left += (note.names or {}).values()


class Folders:
    """The writable folders, opened step by step so that no symlink is followed."""

    def __init__(self, roots: List[str]) -> None:
        self.roots = roots
        self.changed: Set[str] = set()
        self.newest_ns = 0  # change time of what was noted last
        self.held: List[Tuple[str, int]] = []  # descriptors of the last one and those above
        self.deep: Tuple[str, int] = ("", -1)  # of the last one, where that is far below

    def open(self, path: str) -> int:
        """Return a folder's descriptor, good until the next call."""
        if path == self.deep[0]:
            return self.deep[1]
        names = path.split("/")
        common = 0
        for name, (held, _) in zip(names, self.held):
            if name != held:
                break
            common += 1
        self.close(common)
        if not common:
            self.held.append((names[0], self.open_root(names[0])))
        for name in names[len(self.held) : MOST_HELD]:
            self.held.append((name, os.open(name, FOLDER, dir_fd=self.held[-1][1])))
        fd = self.held[-1][1]
        for name in names[MOST_HELD:]:
            fd = os.open(name, FOLDER, dir_fd=fd)
            if self.deep[1] >= 0:
                os.close(self.deep[1])
            self.deep = ("", fd)
        if len(names) > MOST_HELD:
            self.deep = (path, fd)
        return fd

    def open_root(self, number: str) -> int:
        root = self.roots[int(number)]
        self.unlock(number, os.stat(root), root, None)
        return os.open(root, FOLDER)

    def unlock(self, path: str, found: os.stat_result, name: str, fd: Optional[int]) -> None:
        """Make a folder of the box's own one that can be entered."""
        if found.st_mode & 0o500 != 0o500 and found.st_uid == os.getuid():
            os.chmod(name, 0o700, dir_fd=fd)
            self.changed.add(path)

    def change(self, path: str) -> int:
        """Return a folder's descriptor as :meth:`open` does, with leave to change what is in it."""
        fd = self.open(path)
        if path not in self.changed:
            self.changed.add(path)
        found = os.fstat(fd)
        if found.st_mode & 0o300 != 0o300 and found.st_uid == os.getuid():
            os.fchmod(fd, 0o700)
        return fd

    def close(self, keep: int = 0) -> None:
        if self.deep[1] >= 0:
            os.close(self.deep[1])
        self.deep = ("", -1)
        while len(self.held) > keep:
            os.close(self.held.pop()[1])

    def settle(self, notes: Dict[str, Note]) -> None:
        """Give changed folders the mode and time they had, the deepest first."""
        for path in sorted(self.changed, key=lambda p: p.count("/"), reverse=True):
            note = find(notes, path)
            if note is None:
                continue
            fd = self.open(path)
            for name in os.listxattr(fd) if hasattr(os, "listxattr") else ():
                allowed(os.removexattr, fd, name)
            allowed(os.fchmod, fd, note.mode)
            allowed(os.utime, fd, ns=(note.mtime_ns, note.mtime_ns))
            self.note(note, os.fstat(fd))
        self.close()
        self.changed.clear()

    def note(self, note: Note, found: os.stat_result) -> None:
        note.inode, note.ctime_ns = found.st_ino, found.st_ctime_ns
        self.newest_ns = max(self.newest_ns, found.st_ctime_ns)

    def clock_moves_on(self) -> bool:
        """Wait until a change made from now on shows; False when the clock does not get there."""
        for _ in range(100):
            try:
                now = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
            except OSError:
                return False
            if now > self.newest_ns:
                return True
            time.sleep(0.001)
        return False


def allowed(action: Callable[..., object], *args: object, **more: object) -> None:
    """Do what may be refused for a folder that is not the box's own."""
    try:
        action(*args, **more)
    except OSError:
        pass


class Packing:
    """One archive in the making: iterate over it for its pieces; ``notes`` is then complete."""

    def __init__(self, roots: List[str]) -> None:
        self.folders = Folders(roots)
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
            for start, length in spans:
                yield from span(handle, start, length)
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


def data_spans(handle: int, found: os.stat_result) -> List[Tuple[int, int]]:
    """Return where the bytes of a file lie that are not holes, as start and length."""
    size, at = found.st_size, 0
    spans: List[Tuple[int, int]] = []
    if found.st_blocks * 512 >= size:
        return [(0, size)] if size else []
    while at < size:
        try:
            start = os.lseek(handle, at, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:
                break
            return [(0, size)]
        at = os.lseek(handle, start, os.SEEK_HOLE)
        spans.append((start, min(at, size) - start))
    return spans


def span(handle: int, start: int, length: int) -> Iterator[bytes]:
    """Yield so many bytes of a file, with zeros for what is no longer there."""
    while length:
        data = os.pread(handle, min(CHUNK, length), start) or bytes(min(CHUNK, length))
        yield data
        start, length = start + len(data), length - len(data)


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
            return
        if kind == "f":
            write_file(fd, name, mode, more, body)
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


def write_file(fd: int, name: str, mode: int, more: Any, body: Iterator[bytes]) -> None:
    """Write a new file: its size, and the spans of it that come."""
    size, spans = more
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, 0o600, dir_fd=fd)
    try:
        data = memoryview(b"")
        for start, length in spans:
            while length:
                data = data if data else memoryview(next(body, b""))
                if not data:
                    raise EOFError("a file is longer than its record")
                done = os.pwrite(handle, data[:length], start)
                data, start, length = data[done:], start + done, length - done
        os.ftruncate(handle, size)
        os.fchmod(handle, mode)
    finally:
        os.close(handle)


def remove(fd: int, name: str) -> None:
    """Remove what has this name in a folder, with all below it.

    Folders below are moved up before they are emptied, so that no depth is too deep.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=fd)
        return
    left = [name]
    while left:
        folder = left.pop()
        os.chmod(folder, 0o700, dir_fd=fd)
        below = os.open(folder, FOLDER, dir_fd=fd)
        try:
            for entry in os.listdir(below):
                if stat.S_ISDIR(os.stat(entry, dir_fd=below, follow_symlinks=False).st_mode):
                    aside = ".rollart-" + os.urandom(8).hex()
                    os.chmod(entry, 0o700, dir_fd=below)
                    os.rename(entry, aside, src_dir_fd=below, dst_dir_fd=fd)
                    left.append(aside)
                else:
                    os.unlink(entry, dir_fd=below)
        finally:
            os.close(below)
        os.rmdir(folder, dir_fd=fd)


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
