"""Tasks from a git history: commits that change code and the tests of it.

    history -> commits with source and tests, not merges, not too large
            -> the parent with the commit's tests: some fail; with its source too: they pass, twice
            -> row -> gold and empty patch

Takes: a mirror, a way to run tests, a judge of rows. Gives: rows in SWE-bench's format. Never:
gives a row that the judge has not seen, or tells in its statement what the commit says of itself.
"""

from __future__ import annotations

import ast
import asyncio
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from rollart_core.errors import SandboxFailure, first_line
from rollart_envs.swe import probe
from rollart_envs.swe.benches import FailureCount, in_order, of_start
from rollart_envs.swe.hide import test_name, tests_in
from rollart_envs.swe.make import MADE, Judge, MutationOutcome, Row, is_test_file
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.statement import leaked, statement
from rollart_envs.swe.suite import RAN, Failed, FilesRefused, Suite, SuiteRun

_RUN_S: Final = 300.0
_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Which commits are worth a try."""

    max_files: int = 12
    max_lines: int = 400
    """Most lines that the source part of a commit adds and removes."""
    max_test_lines: int = 2000


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that changes source and tests."""

    sha: str
    parent: str
    subject: str
    source: tuple[str, ...]
    tests: tuple[str, ...]
    """All paths that are there for tests, data too."""

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files with tests in them."""
        return tuple(path for path in self.tests if _holds_tests(path))


@dataclass(frozen=True, slots=True)
class Pit:
    """A repository, ready to be mined."""

    name: str
    mirror: Mirror
    suite: Suite
    judge: Judge
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields that all rows have alike."""


def commits(mirror: Mirror, head: str, limits: Limits) -> Iterator[Commit]:
    """Yield the commits before ``head`` that are worth a try, newest first."""
    form = "--format=%x00%H %P%n%s"  # no message holds a NUL
    log = mirror.git("log", "--no-merges", "--no-renames", "--numstat", form, head)
    for entry in log.split("\0")[1:]:
        shas, subject, *lines = entry.split("\n")
        sha, *parents = shas.split()
        stats = [line.split("\t") for line in lines if line.count("\t") == 2]
        found = _worth_a_try(stats, limits) if len(parents) == 1 else None
        if found is not None:
            yield Commit(sha, parents[0], subject, *found)


async def mine(
    pit: Pit, found: Iterator[Commit], jobs: int, done: Mapping[str, str]
) -> AsyncIterator[tuple[Commit, MutationOutcome]]:
    """Yield commits and what came of them, in order, those that are ``done`` left out.

    Raises:
        SandboxFailure: Boxes do not come up.
    """
    fresh = (commit for commit in found if commit.sha not in done)
    results = in_order(fresh, partial(_tried, pit), jobs)
    count = FailureCount()
    try:
        async for commit, outcome in results:
            count.take(outcome.what, not outcome.is_final)
            yield commit, outcome
    finally:
        await results.aclose()  # type: ignore[attr-defined]


async def _tried(pit: Pit, commit: Commit) -> MutationOutcome:
    """Try a commit, again if its box fails, and then leave it out; but not when none starts."""
    for left in reversed(range(_TRIES)):
        try:
            return await _outcome(pit, commit)
        except FilesRefused as refused:
            return MutationOutcome(str(refused))
        except SandboxFailure as failure:
            if of_start(failure):
                raise
            if not left:
                return MutationOutcome(
                    f"its boxes fail: {first_line(str(failure))}", is_final=False
                )
    raise AssertionError


async def _outcome(pit: Pit, commit: Commit) -> MutationOutcome:
    runs = await _before_and_after(pit, commit)
    if isinstance(runs, str):
        return MutationOutcome(runs)
    before, after = runs
    to_mend = after.passed - before.passed
    if not to_mend:
        return MutationOutcome("no test fails before and passes after it")
    row = await asyncio.to_thread(_row, pit, commit, before, after)
    if row is None:
        return MutationOutcome("its statement would give it away")
    problem = await pit.judge(row)
    if not problem:
        pit.mirror.keep(str(row["instance_id"]), commit.parent)
    return (
        MutationOutcome(f"the judge: {first_line(problem)}")
        if problem
        else MutationOutcome(MADE, row)
    )


async def _before_and_after(pit: Pit, commit: Commit) -> tuple[SuiteRun, SuiteRun] | str:
    """Return the runs of a commit's tests without and with its source, or why there are none."""
    tree, tests, source = await asyncio.to_thread(_contents, pit, commit)
    files = [path for path in commit.test_files if tests[path] is not None]
    if not files:
        return "it removes its tests"
    checkout = await pit.suite.open(tree)
    try:
        after = await checkout.run(files, files={**tests, **source}, timeout_s=_RUN_S, hash_seed=1)
        if after.timed_out:
            return "its tests take too long"
        if after.exit_code not in RAN or after.not_collected or not after.passed:
            return f"its tests cannot be run: {_why(after)}"
        again = await checkout.run(files, files={**tests, **source}, timeout_s=_RUN_S)
        before = await checkout.run(files, files=tests, timeout_s=_RUN_S)
    finally:
        await checkout.close()
    both = {test: after.statuses[test] for test in after.passed & again.passed}
    return before, replace(after, statuses=both)


_Files: TypeAlias = dict[str, bytes | None]


def _contents(pit: Pit, commit: Commit) -> tuple[bytes, _Files, _Files]:
    """Return the parent's tree, and the commit's test and source files."""
    read = partial(pit.mirror.read, commit.sha)
    tests, source = ({path: read(path) for path in part} for part in (commit.tests, commit.source))
    return pit.mirror.archive(commit.parent), tests, source


def _row(pit: Pit, commit: Commit, before: SuiteRun, after: SuiteRun) -> Row | None:
    patch = pit.mirror.diff(commit.parent, commit.sha, commit.source)
    test_patch = pit.mirror.diff(commit.parent, commit.sha, commit.tests)
    to_mend = sorted(after.passed - before.passed)
    failures = _failures(pit, commit, to_mend, before, after)
    text = statement(pit.name, failures, patch, never=(commit.sha[:7], commit.subject))
    if leaked(text, patch) or not patch.strip():
        return None
    files = [path for path in commit.test_files if pit.mirror.read(commit.sha, path) is not None]
    instance = f"{pit.name}-{sha256(patch.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
    return {
        "instance_id": instance,
        "base_commit": commit.parent,
        "problem_statement": text,
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": to_mend,
        "PASS_TO_PASS": sorted(after.passed & before.passed),
        "test_command": shlex.join(["python3", "-m", "pytest", *pit.suite.arguments, *files]),
        **pit.fields,
    }


def _failures(
    pit: Pit, commit: Commit, to_mend: Sequence[str], before: SuiteRun, after: SuiteRun
) -> dict[str, Failed]:
    """Return why tests fail before; only those that the commit brings or changes, if it does.

    Where a file cannot be imported before, old tests of it fail too, and say nothing.
    """
    fresh = {test for path in commit.test_files for test in _fresh_tests(pit, commit, path)}
    told = [test for test in to_mend if test.split("[", 1)[0] in fresh] or to_mend
    return {test: _failed(pit, commit, test, before, after) for test in told}


def _failed(pit: Pit, commit: Commit, test: str, before: SuiteRun, after: SuiteRun) -> Failed:
    """Return why a test fails before: by itself, or since its file cannot be imported."""
    if test in before.failures:
        return before.failures[test]
    path, name = test_name(test)
    message = before.not_collected.get(path) or "it does not run"
    node = tests_in(_source(pit, commit.sha, path)).get(name)
    parts = [text for inner in getattr(node, "body", ()) for text in probe.expected(inner)]
    return Failed(message, after.docs.get(test, ""), tuple(probe.short(parts)))


def _fresh_tests(pit: Pit, commit: Commit, path: str) -> Iterator[str]:
    """Yield the tests of a file that are not the same in the parent."""
    old, new = (tests_in(_source(pit, sha, path)) for sha in (commit.parent, commit.sha))
    for name, node in new.items():
        if name not in old or ast.unparse(old[name]) != ast.unparse(node):
            yield f"{path}::{name}"


def _source(pit: Pit, sha: str, path: str) -> str:
    return (pit.mirror.read(sha, path) or b"").decode("utf-8", "replace")


def _worth_a_try(
    stats: list[list[str]], limits: Limits
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the source and test paths of a commit; None when it is not worth a try."""
    if len(stats) > limits.max_files or any(added == "-" for added, _, _ in stats):
        return None  # too large, or with binary files
    paths = [path for _, _, path in stats]
    if any(path.startswith('"') for path in paths):
        return None
    lines = {path: int(added) + int(removed) for added, removed, path in stats}
    tests = tuple(path for path in paths if is_test_file(path))
    source = tuple(path for path in paths if path not in tests)
    fits = (
        any(map(_holds_tests, tests))
        and any(path.endswith(".py") for path in source)
        and sum(lines[path] for path in source) <= limits.max_lines
        and sum(lines[path] for path in tests) <= limits.max_test_lines
    )
    return (source, tests) if fits else None


def _holds_tests(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _why(run: SuiteRun) -> str:
    messages = [*run.not_collected.values(), *(f.message for f in run.failures.values())]
    lines = messages or run.said.strip().splitlines()[-1:] or ["pytest said nothing"]
    return first_line(lines[0], 120)
