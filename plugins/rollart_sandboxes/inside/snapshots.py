"""Snapshots of the box: taken for the host, who keeps them, and brought back.

Takes: the calls ``snapshot``, ``rewind`` and ``restore``. Gives: an archive, and notes of what was
packed; then which parts of it are needed; then the folders as they were: what bears its note stays,
all else is removed and unpacked again. Never: lets anything of the old episode run on, or run while
the folders are on their way back; packs holes, sockets, or what somebody else keeps shut; follows a
symlink.

An archive is records one after another: two lengths (u32 header, u64 body, big endian), a JSON
header ``[path, kind, mode, mtime_ns, more]``, raw bytes. A path starts with the number of its
folder. ``more`` is the target of a link, or the size of a file and where its bytes lie in it.

Where memory is the disk (tmpfs), the kernel does not ask to be told of the first write to a page
of a shared mapping that was read before: the file has other bytes then, and its old change time.
So its note holds a digest, which begins with a key, and neither leaves the agent: nobody in the box
can look for another content of the same digest.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import struct
import threading
import time

from rollart_sandboxes.inside.processes import children, descendants, signal_one
from rollart_sandboxes.inside.tree import Folders, Note, every, find, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Tuple

MOST_NOTED = 100_000
END_S = 10.0


class Snapshots:
    """What is noted of each snapshot, newest last."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.notes: Dict[str, Dict[str, Note]] = {}
        self.num_notes: Dict[str, int] = {}
        self.restoring: Optional[Restoring] = None
        self.one_at_a_time = threading.Lock()

    def take(self, header: Dict[str, Any]) -> None:
        """Send an archive of the folders; what a program may still write to is not noted."""
        with self.one_at_a_time:
            alone, begun = self.alone(), self.agent.num_execs
            packing = Packing(self.agent.roots)
            for piece in packing:
                self.agent.send_when_room({"id": header["id"], "part": 1}, piece)
            alone = alone and self.agent.num_execs == begun and self.alone()
            if not (alone and packing.folders.clock_moves_on()):
                distrust(packing.notes)
            self.notes[header["name"]] = packing.notes
            self.num_notes[header["name"]] = packing.num_notes
            while sum(self.num_notes.values()) > MOST_NOTED:
                oldest = next(iter(self.notes))
                del self.notes[oldest], self.num_notes[oldest]

    def alone(self) -> bool:
        """Whether nothing else runs; what is dying gets a moment."""
        for _ in range(50):
            if self.agent.execs:
                return False
            if not self.others():
                return True
            time.sleep(0.001)
        return False

    def others(self) -> List[int]:
        """Return the processes that are not the agent's own."""
        if self.agent.pid == 1:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return sorted(descendants(children()))

    def rewind(self, header: Dict[str, Any]) -> Optional[Tuple[Dict[str, Any], bytes]]:
        """Kill everything, remove what differs, and say what is needed to bring the rest back."""
        with self.one_at_a_time:
            self.end_others()
            known = self.notes.get(header["name"])
            self.restoring = Restoring(self.agent.roots, known or {})
            if known is None or header["whole"]:
                self.restoring.wipe()
                return {"whole": True}, b""
            spans = self.restoring.compare()
            if spans:
                return {"whole": False}, json.dumps(spans).encode()
            self.finish(header["name"])
            return {"done": True}, b""

    def restore(self, header: Dict[str, Any]) -> None:
        """Unpack what was asked for."""
        with self.one_at_a_time:
            pieces, rest = self.agent.files.uploaded(header["id"]), memoryview(b"")

            def read(size: int) -> bytes:
                nonlocal rest
                if not rest:
                    rest = memoryview(next(pieces, b""))
                given, rest = rest[:size], rest[size:]
                return bytes(given)

            if self.restoring is None:
                raise OSError(errno.EINVAL, "nothing is being restored")
            for record, body in records(read):
                self.restoring.place(record, body)
            self.finish(header["name"])

    def finish(self, name: str) -> None:
        restoring = self.restoring
        assert restoring is not None
        restoring.settle()
        if not restoring.folders.clock_moves_on():
            distrust(restoring.notes)
        self.restoring = None
        self.agent.thaw()

    def end_others(self) -> None:
        """Kill all that runs in the box besides the agent, and wait for its end."""
        ends_at = time.monotonic() + END_S
        while self.agent.execs or self.others():
            if time.monotonic() > ends_at:
                raise OSError(errno.EBUSY, "what runs in the box does not end")
            for run in list(self.agent.execs.values()):
                self.agent.kill(run)
            if self.agent.pid == 1:
                signal_one(-1, signal.SIGKILL)
            else:
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    for pid in self.others():
                        signal_one(pid, number)
            time.sleep(0.001)


def distrust(notes: Dict[str, Note]) -> None:
    """Let everything differ from what was noted."""
    for note in every(notes):
        note.ctime_ns = -1


CHUNK = 1 << 18
KEY = os.urandom(32)
# An overlay tells what the file system of its upper folder does, which is a disk's.
TELLING = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "overlay"}


class Telling:
    """Which file systems set the change time at whatever writes to a file."""

    def __init__(self) -> None:
        self.devices: Dict[int, bool] = {}

    def of(self, handle: int, device: int) -> bool:
        """Whether that of a file does; one that is not known does not."""
        if device not in self.devices:
            self.devices[device] = kind(handle) in TELLING
        return self.devices[device]


def kind(handle: int) -> str:
    """Return the kind of a file's file system; empty where there is no telling."""
    try:
        with open(f"/proc/self/fdinfo/{handle}") as file:
            mount = [line.split()[1] for line in file if line.startswith("mnt_id:")]
        with open("/proc/self/mountinfo") as file:
            for line in file:
                if line.split(" ", 1)[0] in mount:
                    return line.partition(" - ")[2].split(" ", 1)[0]
    except OSError:
        pass
    return ""


def hasher(size: int, spans: List[Tuple[int, int]]) -> Any:
    """Return what takes the bytes of the spans, in turn, and gives their digest."""
    from hashlib import sha256  # of those with a key or none, the one that processors help with

    return sha256(b"%s%d %s " % (KEY, size, repr(spans).encode()))


def digest(handle: int, found: os.stat_result) -> bytes:
    """Return the digest of a file."""
    spans = data_spans(handle, found)
    whole = hasher(found.st_size, spans)
    for start, length in spans:
        for data in span(handle, start, length):
            whole.update(data)
    return bytes(whole.digest())


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
