"""Run a repository's test suite in a sandbox to analyse it: for making tasks, not for grading.

Takes: a source of sandboxes, a tree as a tar archive, pytest's arguments. Gives: :class:`SuiteRun`.
Never: runs code of the repository on the host.
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
_TRY: Final = """\
import contextlib, io, json, sys

sys.path[:1] = ["."]
results = []
for script in json.load(sys.stdin):
    said = {"error": "", "value": ""}
    for what, text in (("error", script["check"]), ("value", script["value"])):
        scope = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(script["setup"], scope)
                if what == "error":
                    exec(text, scope)
                elif text:
                    said[what] = repr(eval(text, scope))
            except BaseException as error:
                if what == "error":
                    said[what] = (type(error).__name__ + ": " + str(error)).rstrip(": ")
    results.append(said)
print("\\n" + json.dumps(results))
"""
RAN: Final = (0, 1)
"""pytest's exit codes if the tests ran to the end."""
NO_TESTS: Final = 5


_FIELDS: Final = ("setup", "check", "value")


class FilesRefused(Exception):
    """Files that cannot be written into a sandbox's tree; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a test does, as a script."""

    setup: str
    check: str
    """Raises an error if the test fails."""
    value: str = ""
    """The expression whose value is checked; empty if there is none."""

    @property
    def text(self) -> str:
        """The script as a whole."""
        return f"{self.setup}\n\n{self.check}" if self.setup else self.check


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a test failed, for a statement."""

    message: str
    """The error's class and message, with pytest's explanation of an assertion."""
    doc: str = ""
    """The test's docstring."""
    tried: tuple[str, ...] = ()
    """The expectation that failed, with values filled in."""
    script: Script | None = None
    """A script that does the same; None if there is none."""


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """The result of a run of a suite."""

    statuses: Mapping[str, str]
    failures: Mapping[str, Failed]
    calls: Mapping[str, frozenset[tuple[str, int]]]
    """Test -> (file, first line) of the functions it called; empty unless requested."""
    docs: Mapping[str, str]
    """Test -> its docstring, if it has one."""
    not_collected: Mapping[str, str]
    """Files that could not be collected, and why."""
    exit_code: int | None
    """pytest's exit code; None if it did not end normally."""
    timed_out: bool = False
    wall_s: float = 0.0
    said: str = ""
    """The end of the output."""

    @property
    def passed(self) -> frozenset[str]:
        """The tests that passed."""
        return frozenset(test for test, status in self.statuses.items() if status == "PASSED")


@dataclass(frozen=True, slots=True)
class Suite:
    """How to run a repository's tests."""

    sandboxes: SandboxSource
    python: str
    """Absolute path in the sandbox; empty: the ``python3`` on its PATH."""
    python_path: tuple[Path, ...] = ()
    """Folders of the host with the tests' imports."""
    source_path: tuple[str, ...] = ()
    """Folders of the repository to import from, such as ``src``."""
    arguments: tuple[str, ...] = ()
    """Arguments of pytest."""
    python_home: str = ""
    """Folder of the host with this Python; empty: the sandbox has it."""

    def import_path(self) -> str:
        """Return the sandbox's PYTHONPATH."""
        own = [f"{REPO_DIR}/{path}" if path != "." else REPO_DIR for path in self.source_path]
        return ":".join([*own, *map(str, self.python_path)])

    async def open(self, tree: bytes) -> Checkout:
        """Return a checkout of a tree (a tar archive) in its own sandbox."""
        binds = [*map(str, self.python_path), *filter(None, (self.python_home,))]
        sandbox = await self.sandboxes.take(ro_binds=binds)
        try:
            checkout = Checkout(self, sandbox)
            await checkout.unpack(tree)
        except BaseException:
            await self.sandboxes.give_back(sandbox)
            raise
        return checkout


class Checkout:
    """A tree in a sandbox; each run starts with the tree as it was unpacked."""

    def __init__(self, suite: Suite, sandbox: Sandbox) -> None:
        self._suite = suite
        self._sandbox = sandbox
        self._python_there = suite.python
        self._clean = ""

    async def unpack(self, tree: bytes) -> None:
        """Unpack the tree."""
        self._python_there = self._python_there or await find_python(self._sandbox)
        await self._sandbox.write_file(_TREE, tree)
        needed = map(str, self._suite.python_path)
        arguments = ("-I", "-S", "-c", _UNPACK, _TREE, REPO_DIR, *needed)
        done = await self._python(*arguments, timeout_s=120.0)
        if done.exit_code != 0:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxFailure(f"the tree could not be unpacked: {said}", boundary="swe.unpack")
        if unread := done.stdout.decode(errors="replace").split("\n")[0]:
            raise UserError(
                f"{unread}: cannot be read in the sandbox; use a folder that is not below /work,"
                " which the sandbox uses itself, and that other users can read"
            )
        self._clean = await self._sandbox.snapshot()

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
            tests: Files or ids; if empty, the whole suite.
            files: Path -> its content; None removes it.
            timeout_s: Timeout of the whole run.
            calls: Whether to record which functions each test calls; this is slower.
            hash_seed: Python's hash seed, to detect results that depend on it.

        Raises:
            FilesRefused: If the files cannot be written.
        """
        await self._sandbox.restore(self._clean)
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
            report = await self._sandbox.read_file(_REPORT)
        except OSError:
            report = b""
        return _suite_run(report, done)

    async def try_scripts(
        self,
        scripts: Sequence[Script],
        *,
        files: Mapping[str, bytes | None] | None = None,
        timeout_s: float,
    ) -> list[dict[str, str]]:
        """Run scripts on the tree with some files changed.

        Returns:
            For each script the ``error`` of its check, and the ``value`` of its expression, both
            empty if there is none. No result at all if a script ended the process, or hangs.
        """
        await self._sandbox.restore(self._clean)
        await self._change(files or {})
        order = json.dumps([{name: getattr(one, name) for name in _FIELDS} for one in scripts])
        path = self._suite.import_path()
        env = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        done = await self._python(
            "-c", _TRY, timeout_s=timeout_s, cwd=REPO_DIR, stdin=order.encode(), env=env
        )
        try:
            results = json.loads(done.stdout.decode(errors="replace").strip().split("\n")[-1])
        except ValueError:
            return []
        return results if isinstance(results, list) else []

    async def close(self) -> None:
        """Return the sandbox."""
        await self._suite.sandboxes.give_back(self._sandbox)

    async def _change(self, files: Mapping[str, bytes | None]) -> None:
        gone = [path for path, content in files.items() if content is None]
        if gone:
            await self._sandbox.exec(("rm", "-rf", "--", *gone), timeout_s=30.0, cwd=REPO_DIR)
            await self._remove_emptied({str(PurePosixPath(path).parent) for path in gone})
        for path, content in files.items():
            if content is not None:
                try:
                    await self._sandbox.write_file(f"{REPO_DIR}/{path}", content)
                except OSError as e:
                    why = e.strerror or str(e)
                    raise FilesRefused(f"its files cannot be put in: {why}") from e

    async def _remove_emptied(self, folders: set[str]) -> None:
        """Remove empty folders, as git does: a file can replace them."""
        within = sorted(folders - {"."})
        if within:
            # rmdir stops at the first folder that is not empty, as intended.
            script = 'for folder; do rmdir -p -- "$folder" 2>/dev/null; done'
            argv = ("sh", "-c", script, "sh", *within)
            await self._sandbox.exec(argv, timeout_s=30.0, cwd=REPO_DIR)

    async def _python(
        self,
        *arguments: str,
        timeout_s: float,
        cwd: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        argv = (self._python_there, *arguments)
        if home := self._suite.python_home:
            env = {**(env or {}), "LD_LIBRARY_PATH": f"{home}/lib"}
        return await self._sandbox.exec(argv, timeout_s=timeout_s, cwd=cwd, stdin=stdin, env=env)


def _suite_run(report: bytes, done: ExecResult) -> SuiteRun:
    records = [_record(line) for line in report.splitlines()]
    tests = {str(r["id"]): r for r in records if "id" in r and r.get("status")}
    ends = [int(str(r["end"])) for r in records if "end" in r]
    return SuiteRun(
        statuses={test: str(r["status"]) for test, r in tests.items()},
        failures={
            test: Failed(
                str(r["message"]), str(r.get("doc") or ""), _texts(r.get("tried")), _script(r)
            )
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


def _script(record: Mapping[str, object]) -> Script | None:
    said = record.get("script")
    return Script(**said) if isinstance(said, dict) and said else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _calls(pairs: object) -> frozenset[tuple[str, int]]:
    assert isinstance(pairs, list)
    return frozenset((str(path), int(line)) for path, line in pairs)


@cache
def _probe_source() -> str:
    return Path(probe.__file__).read_text(encoding="utf-8")
