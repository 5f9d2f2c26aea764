"""Snapshots of the sandbox: created for the host, which stores them, and restored.

Takes: the calls ``snapshot``, ``rewind`` and ``restore``. Gives: an archive, and notes about each
packed path; then the parts of the archive that are needed; then the restored folders: a path that
matches its note stays, everything else is removed and unpacked again. Never: lets a process of the
old episode continue, or run during the restore; packs holes, sockets, or folders that another user
has closed; follows a symlink.

An archive is a sequence of records: two lengths (u32 header, u64 body, big endian), a JSON header
``[path, kind, mode, mtime_ns, more]``, raw bytes. A path starts with the number of its folder.
``more`` is the target of a link, or the size of a file and the positions of its bytes.

On tmpfs the kernel is not notified of the first write to a page of a shared mapping that was read
before: the file then has other bytes, and its old change time. Therefore its note holds a digest,
which begins with a secret key. Neither leaves the agent, so code in the sandbox cannot search for
another content with the same digest.
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
    """The notes of each snapshot, newest last."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.notes: Dict[str, Dict[str, Note]] = {}
        self.num_notes: Dict[str, int] = {}
        self.restoring: Optional[Restoring] = None
        self.one_at_a_time = threading.Lock()

    def take(self, header: Dict[str, Any]) -> None:
        """Send an archive of the folders; if a program may still write, its notes are outdated."""
        with self.one_at_a_time:
            alone, begun = self.alone(), self.agent.num_execs
            packing = Packing(self.agent.roots)
            for piece in packing:
                self.agent.send_when_possible({"id": header["id"], "part": 1}, piece)
            alone = alone and self.agent.num_execs == begun and self.alone()
            if not (alone and packing.folders.clock_moves_on()):
                distrust(packing.notes)
            self.notes[header["name"]] = packing.notes
            self.num_notes[header["name"]] = packing.num_notes
            while sum(self.num_notes.values()) > MOST_NOTED:
                oldest = next(iter(self.notes))
                del self.notes[oldest], self.num_notes[oldest]

    def alone(self) -> bool:
        """Return whether nothing else runs; dying processes get a moment to end."""
        for _ in range(50):
            if self.agent.execs:
                return False
            if not self.others():
                return True
            time.sleep(0.001)
        return False

    def others(self) -> List[int]:
        """Return the processes other than the agent."""
        if self.agent.pid == 1:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return sorted(descendants(children()))

    def rewind(self, header: Dict[str, Any]) -> Optional[Tuple[Dict[str, Any], bytes]]:
        """Kill all processes, remove what differs, and return what the restore needs."""
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
        """Unpack the requested parts of the archive."""
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
        """Kill all processes in the sandbox except the agent, and wait for their end."""
        ends_at = time.monotonic() + END_S
        while self.agent.execs or self.others():
            if time.monotonic() > ends_at:
                raise OSError(errno.EBUSY, "processes in the sandbox do not end")
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
    """Mark all notes as outdated, so that everything counts as changed."""
    for note in every(notes):
        note.ctime_ns = -1


CHUNK = 1 << 18
KEY = os.urandom(32)
# An overlay behaves as the file system of its upper folder, which is on a disk.
WITH_CHANGE_TIMES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "overlay"}


class ChangeTimes:
    """The file systems that update the change time at every write to a file."""

    def __init__(self) -> None:
        self.devices: Dict[int, bool] = {}

    def of(self, handle: int, device: int) -> bool:
        """Return whether a file's file system does; an unknown one counts as one that does not."""
        if device not in self.devices:
            self.devices[device] = kind(handle) in WITH_CHANGE_TIMES
        return self.devices[device]


def kind(handle: int) -> str:
    """Return the type of a file's file system; empty if it is unknown."""
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
    """Return a hash object that takes the bytes of the spans in order."""
    from hashlib import sha256  # processors have instructions for it

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
    """Return the spans of a file that are not holes, as start and length."""
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
    """Yield so many bytes of a file; bytes that no longer exist are zeros."""
    while length:
        data = os.pread(handle, min(CHUNK, length), start) or bytes(min(CHUNK, length))
        yield data
        start, length = start + len(data), length - len(data)


RECORD = struct.Struct(">IQ")
MOST_LEVELS = 1000


class Packing:
    """One archive during its creation: iterate for its pieces; then ``notes`` is complete."""

    def __init__(self, roots: List[str]) -> None:
        self.folders = Folders(roots)
        self.change_times = ChangeTimes()
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
        """Pack one path of a folder; return True for a folder whose content must be packed."""
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
            has_times = self.change_times.of(handle, found.st_dev)
            whole = None if has_times else hasher(found.st_size, spans)
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
    """Yield the header of each record and its body; unread bytes of a body are skipped.

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
    """Restores the folders to the noted state.

    ``compare -> place for each wanted record -> settle``.
    """

    def __init__(self, roots: List[str], notes: Dict[str, Note]) -> None:
        self.folders = Folders(roots)
        self.notes = notes
        self.wanted: List[Note] = []
        self.relinked: List[str] = []

    def wipe(self) -> None:
        """Remove everything, so that everything is restored."""
        for number, root in enumerate(self.folders.roots):
            if os.path.isdir(root):
                fd = self.folders.change(str(number))
                for name in os.listdir(fd):
                    remove(fd, name)

    def compare(self) -> List[List[int]]:
        """Remove what differs; return the parts of the archive to restore: start, length."""
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
        """Compare the content of one folder; its remaining folders are added to ``left``."""
        fd = self.folders.open(path)
        here: Any = names
        if path in self.folders.changed:  # otherwise it has the same names
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
        """Return whether this is an unchanged folder of another user."""
        return note.foreign and stat.S_ISDIR(found.st_mode) and found.st_uid != os.getuid()

    def want(self, note: Note) -> None:
        """Mark a path and everything below it as wanted; sockets cannot be restored."""
        self.wanted += [n for n in every({"": note}) if n.length]

    def place(self, header: Any, body: Iterator[bytes]) -> None:
        """Restore one path."""
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
        """Note a folder's mode and time if it has no note."""
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
        """Write a new file; if its note has a digest, update it from the new content."""
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
        """Finish folders and links, after all paths have been restored."""
        for path in self.relinked:
            parent, _, name = path.rpartition("/")
            self.note(self.folders.open(parent), name, path)
        self.folders.settle(self.notes)


def holds(fd: int, name: str, note: Note, found: os.stat_result) -> bool:
    """Return whether a file holds the noted bytes.

    A user who cannot read a file cannot map it, and a change of its mode would change its ctime.
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
    """Set the size of a new file, and write the received spans."""
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
