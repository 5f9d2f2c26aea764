"""A repository's test suite, run in a box to learn of it: for making tasks, not for grading.

Takes: where boxes come from, a tree as a tar archive, pytest's arguments. Gives: :class:`SuiteRun`.
Never: runs any of the repository's code on the host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import SandboxFailure, UserError
from rollart_envs.swe import probe
from rollart_sandboxes.judging.functions import find_python
from rollart_sandboxes.pool.source import SandboxSource

REPO_DIR: Final = "/work/repo"
_REPORT: Final = "/tmp/probe.jsonl"
_TREE: Final = "/tmp/tree.tar"
_UNPACK: Final = """\
import os, sys, tarfile
os.makedirs(sys.argv[2], exist_ok=True)
with tarfile.open(sys.argv[1]) as tar:
    tar.extractall(sys.argv[2])
os.unlink(sys.argv[1])
print("".join(path + "\\n" for path in sys.argv[3:] if not os.access(path, os.R_OK | os.X_OK)))
"""
RAN: Final = (0, 1)
"""pytest's exit codes that mean the tests ran to the end."""
NO_TESTS: Final = 5


class FilesRefused(Exception):
    """Files for which there is no place in a box's tree; says why."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a test failed, for a statement."""

    message: str
    """The error's class and message, with pytest's account of an assertion."""
    doc: str = ""
    """The test's docstring."""
    tried: tuple[str, ...] = ()
    """What it expected where it failed, values filled in."""


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """What a run of a suite gave."""

    statuses: Mapping[str, str]
    failures: Mapping[str, Failed]
    calls: Mapping[str, frozenset[tuple[str, int]]]
    """Test -> (file, first line) of the functions it called; empty unless asked for."""
    docs: Mapping[str, str]
    """Test -> its docstring, where it has one."""
    not_collected: Mapping[str, str]
    """Files that could not be collected, and why."""
    exit_code: int | None
    """pytest's own; None when it did not end by itself."""
    timed_out: bool = False
    wall_s: float = 0.0
    said: str = ""
    """The end of what was printed."""

    @property
    def passed(self) -> frozenset[str]:
        """The tests that passed."""
        return frozenset(test for test, status in self.statuses.items() if status == "PASSED")


@dataclass(frozen=True, slots=True)
class Suite:
    """How to run a repository's tests."""

    boxes: SandboxSource
    python: str
    """Absolute path in the box; empty: the ``python3`` on its PATH."""
    python_path: tuple[Path, ...] = ()
    """Folders of the host with what the tests import."""
    source_path: tuple[str, ...] = ()
    """Folders of the repository to import from, such as ``src``."""
    arguments: tuple[str, ...] = ()
    """pytest's."""

    def import_path(self) -> str:
        """Return the box's PYTHONPATH."""
        own = [f"{REPO_DIR}/{path}" for path in self.source_path]
        return ":".join([*own, *map(str, self.python_path)])

    async def open(self, tree: bytes) -> Checkout:
        """Return a checkout of a tree (a tar archive) in a box of its own."""
        box = await self.boxes.take(ro_binds=[str(path) for path in self.python_path])
        try:
            checkout = Checkout(self, box)
            await checkout.unpack(tree)
        except BaseException:
            await self.boxes.give_back(box)
            raise
        return checkout


class Checkout:
    """A tree in a box; each run begins with the tree as it was unpacked."""

    def __init__(self, suite: Suite, box: Sandbox) -> None:
        self._suite = suite
        self._box = box
        self._python_there = suite.python
        self._clean = ""

    async def unpack(self, tree: bytes) -> None:
        """Unpack the tree."""
        self._python_there = self._python_there or await find_python(self._box)
        await self._box.write_file(_TREE, tree)
        needed = map(str, self._suite.python_path)
        arguments = ("-I", "-S", "-c", _UNPACK, _TREE, REPO_DIR, *needed)
        done = await self._python(*arguments, timeout_s=120.0)
        if done.exit_code != 0:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxFailure(f"the tree could not be unpacked: {said}", boundary="swe.unpack")
        if unread := done.stdout.decode(errors="replace").split("\n")[0]:
            raise UserError(
                f"{unread}: cannot be read in the box; it must neither lie below /work, which is"
                " the box's own, nor in a folder that only you can read"
            )
        self._clean = await self._box.snapshot()

    async def run(
        self,
        tests: Sequence[str] = (),
        *,
        files: Mapping[str, bytes | None] | None = None,
        timeout_s: float,
        calls: bool = False,
        hash_seed: int = 0,
    ) -> SuiteRun:
        """Run tests on the tree with some files changed.

        Args:
            tests: Files or ids; the whole suite when empty.
            files: Path -> its content; None removes it.
            timeout_s: For the whole run.
            calls: Whether to follow which functions each test calls; takes longer.
            hash_seed: Python's, so that what hangs on it is seen.

        Raises:
            FilesRefused: The files cannot be written.
        """
        await self._box.restore(self._clean)
        await self._change(files or {})
        order = json.dumps({"path": _REPORT, "calls": calls})
        done = await self._python(
            *("-c", _probe_source(), *self._suite.arguments, *tests),
            timeout_s=timeout_s,
            cwd=REPO_DIR,
            stdin=order.encode() + b"\n",
            env={
                "PYTHONPATH": self._suite.import_path(),
                "PYTHONHASHSEED": str(hash_seed),
                "LC_ALL": "C.UTF-8",
            },
        )
        try:
            report = await self._box.read_file(_REPORT)
        except OSError:
            report = b""
        return _suite_run(report, done)

    async def close(self) -> None:
        """Give the box back."""
        await self._suite.boxes.give_back(self._box)

    async def _change(self, files: Mapping[str, bytes | None]) -> None:
        gone = [path for path, content in files.items() if content is None]
        if gone:
            await self._box.exec(("rm", "-rf", "--", *gone), timeout_s=30.0, cwd=REPO_DIR)
            await self._remove_emptied({str(PurePosixPath(path).parent) for path in gone})
        for path, content in files.items():
            if content is not None:
                try:
                    await self._box.write_file(f"{REPO_DIR}/{path}", content)
                except OSError as e:
                    why = e.strerror or str(e)
                    raise FilesRefused(f"its files cannot be put in: {why}") from e

    async def _remove_emptied(self, folders: set[str]) -> None:
        """Remove folders that hold nothing any more, as git does: a file may take their place."""
        within = sorted(folders - {"."})
        if within:
            # It fails at the first folder that is not empty, which is as it should be.
            script = 'for folder; do rmdir -p -- "$folder" 2>/dev/null; done'
            argv = ("sh", "-c", script, "sh", *within)
            await self._box.exec(argv, timeout_s=30.0, cwd=REPO_DIR)

    async def _python(
        self,
        *arguments: str,
        timeout_s: float,
        cwd: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        argv = (self._python_there, *arguments)
        return await self._box.exec(argv, timeout_s=timeout_s, cwd=cwd, stdin=stdin, env=env)


def _suite_run(report: bytes, done: ExecResult) -> SuiteRun:
    records = [_record(line) for line in report.splitlines()]
    tests = {str(r["id"]): r for r in records if "id" in r and r.get("status")}
    ends = [int(str(r["end"])) for r in records if "end" in r]
    return SuiteRun(
        statuses={test: str(r["status"]) for test, r in tests.items()},
        failures={
            test: Failed(str(r["message"]), str(r.get("doc") or ""), _texts(r.get("tried")))
            for test, r in tests.items()
            if "message" in r
        },
        calls={test: _calls(r["calls"]) for test, r in tests.items() if "calls" in r},
        docs={test: str(r["doc"]) for test, r in tests.items() if r.get("doc")},
        not_collected={str(r["collect"]): str(r["message"]) for r in records if "collect" in r},
        exit_code=ends[-1] if ends else None,
        timed_out=done.timed_out,
        wall_s=done.wall_s,
        said=(done.stdout + done.stderr).decode(errors="replace")[-1000:],
    )


def _record(line: bytes) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _calls(pairs: object) -> frozenset[tuple[str, int]]:
    assert isinstance(pairs, list)
    return frozenset((str(path), int(line)) for path, line in pairs)


@cache
def _probe_source() -> str:
    return Path(probe.__file__).read_text(encoding="utf-8")
