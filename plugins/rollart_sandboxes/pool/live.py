"""The ledger of one user's live sandboxes on one machine: a folder with a file for each sandbox.

Takes: what a sandbox reserves, and what it will leave on the host. Gives: all live sandboxes to
admission, and the sandboxes of killed owners to garbage collection. Never: reports a sandbox as an
orphan while the process that opened it is alive: that process holds a lock on the file, which the
kernel releases when the process ends.

A file has one JSON object per line, so that the lines from before a crash can be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollart_core.contracts.sandbox import RUN_VARIABLE
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.pool.owner import labels, owner_mark

FOLDER_VARIABLE: Final = "ROLLART_BOXES_DIR"
_LOCK: Final = ".lock"
_QUEUE: Final = "queue"
_POLL_S: Final = 0.005
_open: weakref.WeakSet[Line] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """A sandbox, as recorded in the ledger."""

    name: str
    sandbox: str
    """Id of its sandbox type."""
    owner: str
    """``pid:start time``."""
    opened_at: float
    """Unix seconds at which its capacity was reserved."""
    ready_at: float | None = None
    """Unix seconds at which it had started; None during the start."""
    ttl_s: float | None = None
    reserve_bytes: int = 0
    """Memory that it is expected to use."""
    run: str = ""
    """Name of its run, if there is one."""
    is_idle: bool = False
    """Warm: it waits for an episode."""
    left: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Kind -> items that exist on the host until it is closed."""
    is_orphan: bool = False
    """True if its owner is gone."""

    @property
    def pid(self) -> int:
        """Process id of its owner."""
        pid = self.owner.partition(":")[0]
        return int(pid) if pid.isdigit() else 0

    @property
    def used_bytes(self) -> int | None:
        """Memory that it uses now; None if unknown."""
        for folder in (*self.left.get("cgroup", ()), *self.left.get("usage", ())):
            for key in ("memory.current", "memory.usage_in_bytes"):
                with contextlib.suppress(OSError, ValueError):
                    return int(Path(folder, key).read_text())
        return None


class Line:
    """This process's lock on the ledger file of one of its sandboxes."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd
        self.labels = labels(path.stem)
        _open.add(self)

    def update(self, **facts: object) -> None:
        """Add fields of the record, such as ``ready_at``."""
        if self._fd is not None:
            os.write(self._fd, json.dumps(facts).encode() + b"\n")

    def leaves(self, kind: str, what: str) -> None:
        """Record an item that exists on the host until the sandbox is closed."""
        self.update(left=[kind, what])

    def close(self, *, is_gone: bool = True) -> None:
        """Remove the sandbox from the ledger; may be called twice.

        Args:
            is_gone: False if something may be left: garbage collection removes it.
        """
        fd, self._fd = self._fd, None
        if fd is not None:
            if is_gone:
                self.path.unlink(missing_ok=True)
            os.close(fd)

    def forget(self) -> None:
        """Release the file in a fork: the sandbox belongs to the parent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class LiveSandboxes:
    """The ledger folder; see the module.

    Args:
        folder: The folder; if None, :func:`ledger_folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or ledger_folder()

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Lock the ledger for a short time; do nothing slow while it is locked."""
        with _opened(self._made() / _LOCK, os.O_RDWR | os.O_CREAT) as fd:
            while not _locked(fd):
                await asyncio.sleep(_POLL_S)
            yield

    def add(self, record: SandboxRecord) -> Line:
        """Enter a sandbox; the ledger must be locked."""
        path = self.folder / f"{record.name}.box"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        line = Line(path, fd)
        line.update(
            sandbox=record.sandbox,
            owner=record.owner,
            opened_at=record.opened_at,
            ttl_s=record.ttl_s,
            reserve_bytes=record.reserve_bytes,
            run=record.run,
        )
        return line

    def records(self) -> list[SandboxRecord]:
        """Return all sandboxes, oldest first, also those of killed owners; only while locked."""
        found = (_record(path) for path in self._made().glob("*.box"))
        return sorted((r for r in found if r is not None), key=lambda r: r.opened_at)

    def claim(self, record: SandboxRecord) -> Line | None:
        """Become the owner of an orphan, to remove it; return None if another process has it."""
        path = self.folder / f"{record.name}.box"
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return None
        if _locked(fd) and path.exists():  # the previous lock holder has not removed it
            return Line(path, fd)
        os.close(fd)
        return None

    @asynccontextmanager
    async def queued(self) -> AsyncIterator[AdmissionTurn]:
        """Join the queue of processes that wait for capacity."""
        with contextlib.ExitStack() as stack:
            async with self.locked():  # without its lock, the entry looks like a dead one
                folder = self.folder / _QUEUE
                folder.mkdir(mode=0o700, exist_ok=True)
                path = folder / f"{time.time_ns():020d}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
                fd = stack.enter_context(_opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
                stack.callback(path.unlink, missing_ok=True)
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield AdmissionTurn(path)

    def someone_waits(self) -> bool:
        """Return whether a process waits for capacity."""
        return any(_is_held(path) for path in (self.folder / _QUEUE).glob("*"))

    def _made(self) -> Path:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = self.folder.stat()
        except OSError as e:
            raise _unfit(f"the ledger of sandboxes cannot be created at {self.folder}: {e}") from e
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:
            raise _unfit(f"{self.folder} is not yours alone, so it cannot be the sandbox ledger")
        return self.folder


class AdmissionTurn:
    """A position in the queue."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has_come(self) -> bool:
        """Return whether no live process is before it; only while the ledger is locked."""
        for other in sorted(self._path.parent.glob("*")):
            if other == self._path:
                return True
            if _is_held(other):
                return False
            other.unlink(missing_ok=True)
        return True


async def live_sandboxes(ledger: LiveSandboxes) -> list[SandboxRecord]:
    """Return all sandboxes of a ledger, including those of killed owners."""
    async with ledger.locked():
        return ledger.records()


def ledger_folder() -> Path:
    """Return the folder that all processes of this user on this machine share."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser()
    # Not the home, which several machines may share, nor TMPDIR, which may belong to one job.
    shared = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
    return shared / f"rollart-boxes-{os.geteuid()}"


def new_record(sandbox: str, *, ttl_s: float | None, reserve_bytes: int) -> SandboxRecord:
    """Return the record of a sandbox that this process is about to start."""
    return SandboxRecord(
        name=uuid.uuid4().hex[:16],
        sandbox=sandbox,
        owner=owner_mark(),
        opened_at=time.time(),
        ttl_s=ttl_s,
        reserve_bytes=reserve_bytes,
        run=os.environ.get(RUN_VARIABLE, ""),
    )


def _record(path: Path) -> SandboxRecord | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        is_orphan = not _is_held(path)
    except OSError:  # it has just been closed
        return None
    if is_orphan and not path.exists():
        return None
    facts: dict[str, Any] = {"sandbox": "", "owner": "", "opened_at": 0.0}
    left: dict[str, list[str]] = {}
    for text_line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            told = json.loads(text_line)
            if "left" in told:
                kind, what = told.pop("left")
                left.setdefault(str(kind), []).append(str(what))
            facts |= {key: value for key, value in told.items() if key in _FACTS}
    noted = {kind: tuple(what) for kind, what in left.items()}
    return SandboxRecord(name=path.stem, is_orphan=is_orphan, left=noted, **facts)


_FACTS: Final = frozenset(SandboxRecord.__dataclass_fields__) - {"name", "left", "is_orphan"}


def _is_held(path: Path) -> bool:
    """Return whether a live process holds the lock of a file."""
    try:
        with _opened(path, os.O_RDONLY) as fd:
            return not _locked(fd, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _locked(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _unfit(message: str) -> SandboxFailure:
    failure = SandboxFailure(f"{message}; set {FOLDER_VARIABLE}", boundary="sandbox.ledger")
    failure.retryable = False
    return failure


def _forget_all() -> None:
    for line in list(_open):
        line.forget()


os.register_at_fork(after_in_child=_forget_all)
