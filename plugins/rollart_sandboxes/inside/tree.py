"""The writable folders of a sandbox, and the notes about them.

Takes: folders. Gives: descriptors of folders below them, and notes of each path with which a later
comparison finds changes. Never: follows a symlink, holds a descriptor for each level of a deep
tree, or recurses.

A note holds a path's inode and change time. No user can set the change time. Every change of mode,
owner, times or links updates it, and so does every write to a file. If a write through a mapping
may not update it, the note also holds a digest (``snapshots.digest``). A path that matches all of
these is unchanged.
"""

from __future__ import annotations

import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Iterator, List, Optional, Set, Tuple

MOST_HELD = 8
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CLOCK_REALTIME_COARSE = 5  # the clock of change times


class Note:
    """The data of one path: its position in the archive, and how to detect that it changed."""

    __slots__ = (
        *("at", "ctime_ns", "digest", "foreign", "inode", "length", "mode", "mtime_ns", "names"),
    )

    def __init__(self, mode: int, mtime_ns: int) -> None:
        self.mode, self.mtime_ns = mode, mtime_ns
        self.inode = self.ctime_ns = -1
        self.at = self.length = 0
        self.digest = b""  # of a file whose change time does not show every write
        self.names: Optional[Dict[str, Note]] = None  # the content of a folder
        self.foreign = False  # a folder of another user that cannot be entered


def find(notes: Dict[str, Note], path: str) -> Optional[Note]:
    """Return the note of a path, if there is one."""
    number, *names = path.split("/")
    note = notes.get(number)
    for name in names:
        note = note.names.get(name) if note is not None and note.names is not None else None
    return note


def every(notes: Dict[str, Note]) -> Iterator[Note]:
    """Yield all notes, including nested ones."""
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
        self.newest_ns = 0  # newest change time of the noted paths
        self.held: List[Tuple[str, int]] = []  # descriptors of the last folder and its parents
        self.deep: Tuple[str, int] = ("", -1)  # the last folder, if it is below MOST_HELD levels

    def open(self, path: str) -> int:
        """Return a folder's descriptor, valid until the next call."""
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
        """Make a folder of the sandbox's user accessible."""
        if found.st_mode & 0o500 != 0o500 and found.st_uid == os.getuid():
            os.chmod(name, 0o700, dir_fd=fd)
            self.changed.add(path)

    def change(self, path: str) -> int:
        """Return a folder's descriptor as :meth:`open` does, and make the folder writable."""
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
        """Restore the mode and time of changed folders, the deepest first."""
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
        """Wait until later changes get a newer time; return False if the clock does not advance."""
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
    """Call what may be refused for a folder of another user, and ignore the refusal."""
    try:
        action(*args, **more)
    except OSError:
        pass


def remove(fd: int, name: str) -> None:
    """Remove the entry with this name in a folder, with everything below it.

    Nested folders are moved up before they are emptied, so that any depth works.
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
