"""Make tasks from a git history: commits that change code and its tests.

    history -> commits with source and tests, not merges, not too large
            -> the parent with the commit's tests: some fail; with its source too: they pass, twice
            -> row -> gold and empty patch

Takes: a mirror, a way to run tests, a judge of rows. Gives: rows in SWE-bench's format. Never:
gives a row that the judge has not checked, or uses the commit message in its statement.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

from rollart_core.errors import SandboxFailure, UserError, first_line
from rollart_envs.swe import environment, probe
from rollart_envs.swe import package as packages
from rollart_envs.swe.benches import FailureCount, in_order, of_start
from rollart_envs.swe.environment import Interpreter
from rollart_envs.swe.hide import test_name, tests_in
from rollart_envs.swe.make import MADE, Judge, MutationOutcome, Row, is_test_file
from rollart_envs.swe.make_command import PYTEST, Heard, Made
from rollart_envs.swe.mirror import GitError, Mirror
from rollart_envs.swe.statement import leaked, statement
from rollart_envs.swe.suite import RAN, Failed, FilesRefused, Suite, SuiteRun
from rollart_envs.swe.task_folder import TaskFolder
from rollart_sandboxes.pool.source import SandboxSource

_RUN_S: Final = 300.0
_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the commits to try."""

    max_files: int = 12
    max_lines: int = 400
    """Maximum number of source lines that a commit adds and removes."""
    max_test_lines: int = 2000


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that changes source and tests."""

    sha: str
    parent: str
    subject: str
    source: tuple[str, ...]
    tests: tuple[str, ...]
    """All paths that exist for tests, including data."""

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files that contain tests."""
        return tuple(path for path in self.tests if _holds_tests(path))


@dataclass(frozen=True, slots=True)
class Pit:
    """A repository that is ready to be mined."""

    name: str
    mirror: Mirror
    packages_of: Callable[[Commit], Packages]
    judge: Judge
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields that are the same in all rows."""


@dataclass(frozen=True, slots=True)
class Packages:
    """What the tests of a commit import, and how they are run with it."""

    suite: Suite
    fields: Row
    """The fields of rows that use it."""
    generated: Mapping[str, bytes] = field(default_factory=dict)
    """Files that a build writes, and the parent commit does not have."""


def commits(mirror: Mirror, head: str, limits: Limits) -> Iterator[Commit]:
    """Yield the commits before ``head`` that are within the limits, newest first."""
    form = "--format=%x00%H %P%n%s"  # no message contains a NUL
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
    """Yield commits and their results, in order, without those in ``done``.

    Raises:
        SandboxFailure: If sandboxes do not start.
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
    """Try a commit, again if its sandbox fails, then skip it, unless no sandbox starts at all."""
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
    try:
        site = await asyncio.to_thread(pit.packages_of, commit)
    except UserError as error:
        return MutationOutcome(first_line(str(error), 300))
    runs = await _before_and_after(pit, commit, site)
    if isinstance(runs, str):
        return MutationOutcome(runs)
    before, after = runs
    to_mend = after.passed - before.passed
    if not to_mend:
        return MutationOutcome("no test fails before and passes after it")
    row = await asyncio.to_thread(_row, pit, site, commit, before, after)
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


async def _before_and_after(
    pit: Pit, commit: Commit, site: Packages
) -> tuple[SuiteRun, SuiteRun] | str:
    """Return the runs of a commit's tests without and with its source, or why there are none."""
    tree, tests, source = await asyncio.to_thread(_contents, pit, commit)
    tests = {**site.generated, **tests}
    files = [path for path in commit.test_files if tests[path] is not None]
    if not files:
        return "it removes its tests"
    checkout = await site.suite.open(tree)
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


def _row(pit: Pit, site: Packages, commit: Commit, before: SuiteRun, after: SuiteRun) -> Row | None:
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
        "test_command": shlex.join(["python3", "-m", "pytest", *site.suite.arguments, *files]),
        **pit.fields,
        **site.fields,
    }


def _failures(
    pit: Pit, commit: Commit, to_mend: Sequence[str], before: SuiteRun, after: SuiteRun
) -> dict[str, Failed]:
    """Return why tests fail before; only new or changed tests of the commit, if there are any.

    If a file cannot be imported before, its old tests fail too, and are not informative.
    """
    fresh = {test for path in commit.test_files for test in _fresh_tests(pit, commit, path)}
    told = [test for test in to_mend if test.split("[", 1)[0] in fresh] or to_mend
    return {test: _failed(pit, commit, test, before, after) for test in told}


def _failed(pit: Pit, commit: Commit, test: str, before: SuiteRun, after: SuiteRun) -> Failed:
    """Return why a test fails before: its own failure, or that its file cannot be imported."""
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
    """Return the source and test paths of a commit; None if it is outside the limits."""
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


@dataclass(frozen=True, slots=True)
class MineOrder:
    """The order of a user."""

    repo: str
    """A folder or URL."""
    folder: TaskFolder
    count: int = 10
    jobs: int = 2
    revision: str = "HEAD"
    """The newest revision to use."""
    name: str = ""
    """Name of the repository in rows and statements; empty: from its address."""
    requires: tuple[str, ...] = ()
    python_path: tuple[Path, ...] = ()
    """Folders with the tests' imports; empty: they are installed."""
    source_path: tuple[str, ...] = ()
    """Folders of the repository to import from; empty: from the pyproject.toml of each commit."""
    pytest: tuple[str, ...] = ()
    python: str = ""
    """Absolute path in the sandbox; empty: the ``python3`` on its PATH."""
    limits: Limits = field(default_factory=Limits)
    dated: bool = True
    """Whether the tests run with a Python of the date of their commit, from the host."""


async def mine_tasks(
    order: MineOrder,
    sandboxes: SandboxSource,
    judge_in: Callable[[TaskFolder], Judge],
    heard: Heard,
) -> Made:
    """Mine a repository until there are enough tasks, or no commits are left.

    Raises:
        UserError: If the repository does not exist, or no commit is within the limits.
        SandboxFailure: If sandboxes do not start.
    """
    order.folder.make()
    name = name_of(order.name or order.repo)
    heard(f"reading {order.repo}", None)
    mirror = await asyncio.to_thread(_mirror, order, name)
    head = _head(mirror, order)
    fields: Row = {"repo": name, "version": "0"}
    fields |= {"python": order.python} if order.python else {}
    suite = Suite(sandboxes, order.python, arguments=(*PYTEST, *order.pytest))
    sites = _Sites(order, name, mirror, suite, heard)
    pit = Pit(name, mirror, sites.of, judge_in(order.folder), fields)
    return await _mine(order, pit, head, heard)


def name_of(repo: str) -> str:
    """Return a repository's name: the last part of its address."""
    last = re.split(r"[/:]", repo.rstrip("/"))[-1] or Path(repo).resolve().name
    last = Path(repo).resolve().name if last in (".", "..") else last
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last.removesuffix(".git")).strip("-.") or "repository"


async def _mine(order: MineOrder, pit: Pit, head: str, heard: Heard) -> Made:
    worth = list(commits(pit.mirror, head, order.limits))
    if not worth:
        raise UserError(
            f"{order.repo}: no commit changes both Python source and test_*.py files within the"
            f" limits ({order.limits.max_files} files, {order.limits.max_lines} lines of source)"
        )
    progress = order.folder.progress(f"{pit.name}-mined", {"fields": pit.fields})
    there = set(order.folder.ids())
    num_before = num_made = sum(outcome == MADE for outcome in progress.outcomes.values())
    if num_made < order.count:
        results = mine(pit, iter(worth), order.jobs, dict(progress.outcomes))
        try:
            async for commit, outcome in results:
                what = outcome.what
                if outcome.row is not None and outcome.row["instance_id"] in there:
                    what = "it is there already"
                elif outcome.row is not None:
                    order.folder.add(outcome.row)
                    there.add(str(outcome.row["instance_id"]))
                    num_made += 1
                if outcome.is_final:
                    progress.note(commit.sha, what)
                tried = len(progress.outcomes)
                heard(
                    f"{pit.name}: {num_made} tasks of {tried} commits; {what}", tried / len(worth)
                )
                if num_made >= order.count:
                    break
        finally:
            await results.aclose()  # type: ignore[attr-defined]
    outcomes = dict(Counter(progress.outcomes.values()).most_common())
    return Made(pit.name, num_made, num_made - num_before, outcomes)


def _mirror(order: MineOrder, name: str) -> Mirror:
    path = Path(order.repo).expanduser()
    source = str(path.resolve()) if path.exists() else order.repo
    try:
        return Mirror.clone(source, order.folder.mirror_path(name))
    except GitError as error:
        raise UserError(f"{order.repo}: cannot be read as a git repository ({error})") from None


def _head(mirror: Mirror, order: MineOrder) -> str:
    try:
        return mirror.git("rev-parse", "--verify", f"{order.revision}^{{commit}}").strip()
    except GitError:
        raise UserError(f"{order.repo}: has no commit {order.revision!r}") from None


class _Sites:
    """The packages of commits; those of one quarter of a year share them, if they need the same."""

    def __init__(
        self, order: MineOrder, name: str, mirror: Mirror, suite: Suite, heard: Heard
    ) -> None:
        for folder in order.python_path:
            if not folder.is_dir():
                raise UserError(f"--python-path {folder}: there is no such folder")
        self._order, self._name, self._mirror = order, name, mirror
        self._suite, self._heard = suite, heard
        self._making = threading.Lock()
        self._failed: dict[str, str] = {}

    def of(self, commit: Commit) -> Packages:
        """Return the packages of a commit, as of its date; they are installed if missing.

        Raises:
            UserError: If they could not be installed.
        """
        if self._order.python_path:
            folders = tuple(folder.resolve() for folder in self._order.python_path)
            fields: Row = {"python_path": [str(folder) for folder in folders]}
            return self._with(commit, folders, fields)
        date = self._mirror.date(commit.sha)
        quarter = datetime(date.year, (date.month - 1) // 3 * 3 + 1, 1, tzinfo=UTC)
        version = self._version(quarter)
        python = environment.interpreter(version)
        with self._making, tempfile.TemporaryDirectory(prefix="rollart-mine-") as temporary:
            root = Path(temporary).resolve()
            with tarfile.open(fileobj=BytesIO(self._mirror.archive(commit.sha))) as tar:
                tar.extractall(root, filter="data")
            needed = packages.project_requirements(root)
            mark = sha256(json.dumps([version, *needed]).encode()).hexdigest()[:6]
            slug = f"{self._name}-{quarter:%Y-%m}-{mark}"
            if slug in self._failed:
                raise UserError(self._failed[slug])
            if not self._order.folder.site(slug).is_dir():
                released = self._mirror.version(commit.parent)
                self._install(self._order.folder.site(slug), root, python, quarter, released)
        site = self._order.folder.site(slug)
        own: Row = {}
        if self._order.dated and not self._order.python:
            own = python.placed(self._order.folder.path)
        return self._with(commit, (site.resolve(),), {"python_path": [f"site/{slug}"], **own})

    def _version(self, date: datetime) -> str:
        """Return the version of the Python that runs the tests."""
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if self._order.python or not self._order.dated:
            return here
        return environment.version_for(date)

    def _install(
        self, site: Path, root: Path, python: Interpreter, quarter: datetime, version: str
    ) -> None:
        self._heard(f"installing what {self._name} needs as of {quarter:%B %Y}", None)
        before = environment.as_of(quarter + timedelta(days=92), python.version)
        wanted, extras = packages.test_requirements(root)
        needed = packages.project_requirements(root)
        own = ["pytest", *self._order.requires]
        made = site.with_name(site.name + ".made")
        shutil.rmtree(made, ignore_errors=True)
        try:
            try:
                environment.install_project(
                    *(made, root, [*own, *wanted]),
                    python=python,
                    before=before,
                    extras=extras,
                    name=self._name,
                    version=version,
                )
            except UserError:  # a build that fails, or pytest needs a release of the project
                environment.install(made, [*own, *needed], python=python, before=before)
        except UserError as error:
            self._failed[site.name] = f"{error} (give --requires or --python-path)"
            raise UserError(self._failed[site.name]) from None
        for name in packages.project_names(root, self._name):
            packages.keep_only_metadata(made, name)
        made.rename(site)

    def _with(self, commit: Commit, folders: tuple[Path, ...], fields: Row) -> Packages:
        folder = self._order.folder.path.resolve()
        source_path = self._order.source_path or _source_path(self._mirror, commit.parent)
        read = partial(self._mirror.read, commit.parent)
        generated = packages.version_files(read, self._mirror.version(commit.parent))
        fields = {**fields, "source_path": list(source_path)}
        if generated:
            fields["setup"] = packages.version_commands(generated)
        python, home = (fields.get(name) for name in ("python", "python_home"))
        suite = replace(
            self._suite,
            python=str(folder / str(python)) if python else self._suite.python,
            python_path=folders,
            source_path=source_path,
            python_home=str(folder / str(home)) if home else "",
        )
        return Packages(suite, fields, generated)


def _source_path(mirror: Mirror, commit: str) -> tuple[str, ...]:
    """Return the folders of a commit that contain its packages."""
    try:
        loaded = tomllib.loads((mirror.read(commit, "pyproject.toml") or b"").decode())
        where = loaded["tool"]["setuptools"]["packages"]["find"]["where"]
    except (ValueError, KeyError, TypeError):
        where = []
    if isinstance(where, list) and where:
        return tuple(str(path) for path in where)
    return ("src",) if any(p.startswith("src/") for p in mirror.files(commit)) else (".",)
