"""Make tasks from a package: put bugs into working code that its own tests detect.

    package -> its tests, twice -> those that pass, and which functions each calls
            -> bugs in these functions, in a drawn order
            -> the tests that call the function -> all tests -> row -> gold and empty patch

Takes: an unpacked package, a way to run its suite, a judge of rows. Gives: rows in SWE-bench's
format. Never: gives a row that the judge has not checked, or other rows for the same seed.

The base commit of a task is the package with the bug and without the tests that detect it. The
``patch`` removes the bug, and ``test_patch`` restores these tests. So a task has hidden tests as in
SWE-bench, and neither a failing test nor the history of its repository reveals the bug.
"""

from __future__ import annotations

import ast
import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Final, TypeAlias, TypeVar

from rollart_core.errors import SandboxFailure, UserError, first_line
from rollart_envs.swe.benches import Benches, FailureCount, in_order, of_start
from rollart_envs.swe.hide import test_name, without_tests
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.mutate import Mutation, is_another_program, mutated, mutations
from rollart_envs.swe.patch import file_changes
from rollart_envs.swe.statement import Shown, leaked, statement
from rollart_envs.swe.suite import (
    NO_TESTS,
    RAN,
    Checkout,
    FilesRefused,
    Script,
    Suite,
    SuiteRun,
    Tried,
)

Row: TypeAlias = dict[str, object]
Judge: TypeAlias = Callable[[Row], Awaitable[str]]
"""Returns the problem of a row; "" if the gold patch is full and the empty one none."""
_T = TypeVar("_T")
MADE: Final = "made"
_BASELINE_S: Final = 900.0
_SCRIPTS: Final = 16
"""Maximum number of scripts that are tried for one statement."""
_VALUE_CHARS: Final = 400
_TOOLS: Final = frozenset(
    (
        *("tools", "tool", "scripts", "script", "bin", "ci", "docs", "doc", "examples", "example"),
        *("benchmarks", "benchmark", "bench", "build", "contrib", "setup.py", "noxfile.py"),
        *("tasks.py", "fabfile.py", "versioneer.py", "conf.py", "release.py"),
    )
)
"""First folders, and files at the top, that are not a library's."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for acceptable bugs."""

    max_broken: float = 0.3
    """Largest share of the passing tests that a bug can break."""
    several: float = 0.2
    """Share of tasks with more than one bug."""
    timeout_factor: float = 6.0
    """Limit of a run's duration, as a multiple of the duration without the bug."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Bugs that make one task."""

    number: int
    path: str
    bugs: tuple[Mutation, ...]
    seen_by: tuple[frozenset[str], ...] = ()
    """The tests that detect each bug alone; empty for one bug."""


@dataclass(frozen=True, slots=True)
class MutationOutcome:
    """The result of a candidate."""

    what: str
    """``made``, or the reason why not."""
    row: Row | None = None
    is_final: bool = True
    """False if its sandboxes failed, so that it can be tried again."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The result of a suite on the unchanged code."""

    passed: frozenset[str]
    """The tests that passed each time."""
    callers: Mapping[tuple[str, int], frozenset[str]]
    """Function (file, first line) -> the tests that call it and pass."""
    left_out: tuple[str, ...]
    """Files that cannot be collected."""
    wall_s: float
    flaky: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Works:
    """A package that is ready for bugs."""

    name: str
    version: str
    slug: str
    mirror: Mirror
    commit: str
    """The commit of the unchanged package."""
    suite: Suite
    baseline: Baseline
    judge: Judge
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields that are the same in all rows."""
    bounds: Bounds = field(default_factory=Bounds)
    library: frozenset[str] = frozenset()
    """The files of the installed package; if empty, all but those of tests and tools."""
    write: Callable[[str], Awaitable[str]] | None = None
    """Writes a statement with the facts of another; "" if it cannot."""


async def find_baseline(suite: Suite, tree: bytes, name: str) -> Baseline:
    """Run a suite twice and return what passes.

    Raises:
        UserError: If there are no tests, or none passes.
    """
    checkout = await suite.open(tree)
    try:
        first = await checkout.run(timeout_s=_BASELINE_S, calls=True, hash_seed=1)
        if first.exit_code == NO_TESTS or not (first.statuses or first.not_collected):
            raise UserError(f"{name}: {_no_tests(first)}")
        left_out = tuple(sorted({test_name(path)[0] for path in first.not_collected}))
        second = await checkout.run(timeout_s=_BASELINE_S, hash_seed=2)
    finally:
        await checkout.close()
    passed = first.passed & second.passed
    if not passed:
        raise UserError(f"{name}: none of its {len(first.statuses)} tests passes: {_why(first)}")
    callers: dict[tuple[str, int], set[str]] = {}
    for test in passed:
        for function in first.calls.get(test, ()):
            callers.setdefault(function, set()).add(test)
    return Baseline(
        passed,
        {function: frozenset(tests) for function, tests in callers.items()},
        left_out,
        max(first.wall_s, second.wall_s),
        first.passed ^ second.passed,
    )


def candidates(works: Works, seed: int) -> Iterator[Candidate]:
    """Yield the bugs to try, in an order drawn by ``seed``: one in each function, then another.

    No bug is in two candidates, and no two bugs give the same program.
    """
    draw = random.Random(f"{works.slug} {seed}")
    piles = {key: _shuffled(pile, draw) for key, pile in sorted(_piles(works).items())}
    programs: dict[str, _Programs] = {}
    number = 0
    while piles:
        for key in _shuffled(piles, draw):
            if key not in piles:  # its last bug was the second one of a task
                continue
            bugs = [piles[key].pop()]
            if not piles[key]:
                del piles[key]
            if draw.random() < works.bounds.several:
                bugs += _another(key, bugs[0], piles, draw)
            if key[0] not in programs:
                content = works.mirror.read(works.commit, key[0]) or b""
                programs[key[0]] = _Programs(content.decode())
            if new := tuple(bug for bug in bugs if programs[key[0]].is_new(bug)):
                yield Candidate(number, key[0], new)
            number += 1


class _Programs:
    """The programs that bugs make of a file."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._known: set[bytes] = set()

    def is_new(self, bug: Mutation) -> bool:
        """Return whether a bug gives a program that no other one gave, and record it."""
        try:
            program = ast.dump(ast.parse(mutated(self._source, [bug])))
        except (SyntaxError, ValueError):
            return False
        digest = sha256(program.encode()).digest()
        is_new = digest not in self._known
        self._known.add(digest)
        return is_new


async def make(
    works: Works, seed: int, jobs: int, done: Mapping[str, str]
) -> AsyncIterator[tuple[Candidate, MutationOutcome]]:
    """Yield candidates and their results, in order, without those in ``done``.

    Raises:
        SandboxFailure: If sandboxes do not start, or fail repeatedly.
    """
    tree = works.mirror.archive(works.commit)
    benches = Benches(lambda: works.suite.open(tree))
    fresh = (c for c in candidates(works, seed) if str(c.number) not in done)
    results = in_order(fresh, partial(_tried, works, benches), jobs)
    count = FailureCount()
    try:
        async for candidate, outcome in results:
            count.take(outcome.what, not outcome.is_final)
            yield candidate, outcome
    finally:
        await results.aclose()  # type: ignore[attr-defined]
        await benches.close()


async def _tried(works: Works, benches: Benches, candidate: Candidate) -> MutationOutcome:
    """Try a candidate; a failed sandbox is its fault, unless no sandbox starts at all."""
    try:
        return await _outcome(works, benches, candidate)
    except FilesRefused as refused:
        return MutationOutcome(str(refused))
    except SandboxFailure as failure:
        if of_start(failure):
            raise
        return MutationOutcome(f"its boxes fail: {first_line(str(failure))}", is_final=False)


async def _outcome(works: Works, benches: Benches, candidate: Candidate) -> MutationOutcome:
    content = works.mirror.read(works.commit, candidate.path)
    assert content is not None
    source = content.decode()
    if len(candidate.bugs) > 1:
        candidate = await benches.run(partial(_visible, works, candidate, source))
        if not candidate.bugs:
            return MutationOutcome("no test sees it")
    broken = mutated(source, candidate.bugs)
    if not is_another_program(source, broken):
        return MutationOutcome("the same program")
    run = await benches.run(partial(_broken_run, works, candidate, broken.encode()))
    if isinstance(run, str):
        return MutationOutcome(run)
    to_mend = works.baseline.passed - run.passed
    if any(to_mend.isdisjoint(tests) for tests in candidate.seen_by):
        return MutationOutcome("one of its bugs hides another")
    shows = await benches.run(partial(_shows, works, candidate, broken.encode(), run))
    # In a thread, like all repeated git calls: the sandboxes' event loop must not wait for it.
    row = await asyncio.to_thread(_row, works, candidate, broken.encode(), run, shows)
    if row is None:
        return MutationOutcome("its statement would give it away")
    if works.write is not None:
        text = await works.write(str(row["problem_statement"]))
        if text and not leaked(text, str(row["patch"])):
            row["problem_statement"] = text
    problem = await works.judge(row)
    if not problem:
        works.mirror.keep(str(row["instance_id"]), str(row["base_commit"]))
    return (
        MutationOutcome(f"the judge: {first_line(problem)}")
        if problem
        else MutationOutcome(MADE, row)
    )


async def _shows(
    works: Works, candidate: Candidate, broken: bytes, run: SuiteRun, checkout: Checkout
) -> dict[str, Shown]:
    """Return scripts that fail with the bugs and pass without them, by the test they come from."""
    failures = {
        test: failed
        for test, failed in sorted(run.failures.items())
        if failed.script is not None and test in works.baseline.passed
    }
    of_bugs = [test for tests in candidate.seen_by for test in sorted(tests & failures.keys())[:4]]
    by_function = {test.split("[", 1)[0]: test for test in reversed(failures)}
    tests = list(dict.fromkeys((*of_bugs, *by_function.values())))[:_SCRIPTS]
    scripts = [script for test in tests if (script := failures[test].script) is not None]
    if not scripts:
        return {}
    timeout_s = _timeout_s(works)
    wrong = await checkout.try_scripts(scripts, files={candidate.path: broken}, timeout_s=timeout_s)
    right = await checkout.try_scripts(scripts, timeout_s=timeout_s)
    shows = {}
    for test, script, bad, good in zip(tests, scripts, wrong, right, strict=False):
        if bad.error and not good.error:
            shows[test] = shown_by(script, bad, good)
    return shows


def shown_by(script: Script, bad: Tried, good: Tried) -> Shown:
    """Return what a script shows: its first expression with readable, different results."""
    for text, actual, expected in zip(script.values, bad.values, good.values, strict=True):
        if script.raises and not expected and _is_readable(actual):
            return Shown(script, text, actual or bad.error, "", is_error=not actual)
        if expected and actual != expected and _is_readable(actual) and _is_readable(expected):
            return Shown(script, text, actual or bad.error, expected, is_error=not actual)
    return Shown(script, "", bad.error, "", is_error=True)


def _is_readable(value: str) -> bool:
    """Return whether a repr is short and has no address, which changes in each run."""
    return len(value) <= _VALUE_CHARS and " at 0x" not in value


async def _visible(
    works: Works, candidate: Candidate, source: str, checkout: Checkout
) -> Candidate:
    """Return a candidate without the bugs that no test detects, because no statement shows them."""
    seen, seen_by = [], []
    for bug in candidate.bugs:
        alone = replace(candidate, bugs=(bug,))
        callers = _callers(works, alone)
        files = {candidate.path: mutated(source, [bug]).encode()}
        tests = sorted({test.split("[", 1)[0] for test in callers})
        run = await checkout.run(tests, files=files, timeout_s=_timeout_s(works))
        if broken := callers - run.passed:
            seen.append(bug)
            seen_by.append(frozenset(broken))
    return replace(candidate, bugs=tuple(seen), seen_by=tuple(seen_by))


async def _broken_run(
    works: Works, candidate: Candidate, broken: bytes, checkout: Checkout
) -> SuiteRun | str:
    """Return a whole run with the bugs, or the reason why they are not acceptable."""
    files = {candidate.path: broken}
    baseline, timeout_s = works.baseline, _timeout_s(works)
    callers = _callers(works, candidate)
    few = sorted({test.split("[", 1)[0] for test in callers})
    if len(callers) * 2 < len(baseline.passed) and len(few) <= 200:
        quick = await checkout.run(few, files=files, timeout_s=timeout_s)
        if callers <= quick.passed:
            return "no test sees it"
        if problem := _no_good(quick, frozenset(callers)):
            return problem
    run = await checkout.run(files=files, timeout_s=timeout_s)
    if problem := _no_good(run, baseline.passed):
        return problem
    gone = baseline.passed - run.passed
    if not gone:
        return "no test sees it"
    share = len(gone) / len(baseline.passed)
    return "it breaks too much" if share > works.bounds.max_broken else run


def _no_good(run: SuiteRun, expected: frozenset[str]) -> str:
    if run.timed_out:
        return "it hangs"
    if run.exit_code not in RAN or run.not_collected:
        return "the tests cannot be run with it"
    return "" if expected <= frozenset(run.statuses) else "tests are missing with it"


def _timeout_s(works: Works) -> float:
    return 20.0 + works.bounds.timeout_factor * works.baseline.wall_s


def _callers(works: Works, candidate: Candidate) -> set[str]:
    keys = {(candidate.path, bug.function_line) for bug in candidate.bugs}
    return {test for key in keys for test in works.baseline.callers.get(key, ())}


def _row(
    works: Works,
    candidate: Candidate,
    broken: bytes,
    run: SuiteRun,
    shows: Mapping[str, Shown],
) -> Row | None:
    """Return a task; None if no statement can be written that hides the patch."""
    mirror, to_mend = works.mirror, works.baseline.passed - run.passed
    hidden = _hidden(works, to_mend)
    base = mirror.commit_change(works.commit, {candidate.path: broken, **hidden}, works.slug)
    patch = mirror.diff(base, works.commit, [candidate.path])
    test_patch = mirror.diff(base, works.commit, sorted(hidden))
    failures = {test: run.failures[test] for test in to_mend if test in run.failures}
    if not failures:
        return None
    text = statement(works.name, failures, patch, shows=shows, of_bugs=candidate.seen_by)
    if leaked(text, patch):
        return None
    instance = f"{works.slug}-{sha256(patch.encode()).hexdigest()[:8]}"
    return {
        "instance_id": instance,
        "base_commit": base,
        "problem_statement": text,
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": sorted(to_mend),
        "PASS_TO_PASS": sorted(works.baseline.passed & run.passed),
        "version": works.version,
        **works.fields,
    }


def _hidden(works: Works, to_mend: Iterable[str]) -> dict[str, bytes | None]:
    """Return the test files without the tests that detect the bug; None: remove the whole file."""
    by_file: dict[str, set[str]] = {}
    for test in to_mend:
        path, name = test_name(test)
        by_file.setdefault(path, set()).add(name)
    hidden: dict[str, bytes | None] = {}
    for path, names in by_file.items():
        content = works.mirror.read(works.commit, path)
        left = without_tests((content or b"").decode("utf-8", "replace"), names)
        hidden[path] = None if left is None else left.encode()
    return hidden


def _piles(works: Works) -> dict[tuple[str, int], list[Mutation]]:
    """Return the bugs that passing tests can detect, by function."""
    piles: dict[tuple[str, int], list[Mutation]] = {}
    for path in sorted({path for path, _ in works.baseline.callers}):
        is_own = path in works.library if works.library else path.split("/")[0] not in _TOOLS
        if is_test_file(path) or not is_own:
            continue
        try:
            found = mutations((works.mirror.read(works.commit, path) or b"").decode())
        except (SyntaxError, ValueError):
            continue
        for bug in found:
            key = (path, bug.function_line)
            if key in works.baseline.callers:
                piles.setdefault(key, []).append(bug)
    return {key: pile for key, pile in piles.items() if pile}


def changes_of(patch: str) -> frozenset[str]:
    """Return the changes of a patch, each with its file, to detect a bug that is there already."""
    found = set()
    for change in file_changes(patch):
        for hunk in re.split(r"^@@ .*$", change.text, flags=re.MULTILINE)[1:]:
            for block in re.split(r"^(?: .*)?$", hunk, flags=re.MULTILINE):
                if block.strip():
                    found.add(f"{change.new}\n{block.strip()}")
    return frozenset(found)


def is_test_file(path: str) -> bool:
    """Return whether a path is a test file, or exists for tests."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    return (
        any(part in ("tests", "test", "testing") for part in parts[:-1])
        or name.startswith("test_")
        or name.endswith("_test.py")
        or name in ("conftest.py", "test.py", "tests.py")
    )


def _another(
    key: tuple[str, int],
    first: Mutation,
    piles: dict[tuple[str, int], list[Mutation]],
    draw: random.Random,
) -> list[Mutation]:
    """Return a bug in another function of the same file, if there is one."""
    others = [other for other in sorted(piles) if other[0] == key[0] and other != key]
    if not others:
        return []
    other = draw.choice(others)
    bug = piles[other][-1]
    overlaps = bug.start < first.end and first.start < bug.end
    inside = bug.function.startswith(first.function) or first.function.startswith(bug.function)
    if overlaps or inside:
        return []
    piles[other].pop()  # it is in no other task
    if not piles[other]:
        del piles[other]
    return [bug]


def _shuffled(items: Iterable[_T], draw: random.Random) -> list[_T]:
    shuffled = list(items)
    draw.shuffle(shuffled)
    return shuffled


def _no_tests(run: SuiteRun) -> str:
    if run.timed_out:
        return f"its tests do not end within {_BASELINE_S:.0f} s"
    if run.exit_code == NO_TESTS:
        return "it has no tests: pytest finds none (an sdist may come without; try its repository)"
    lines = run.said.strip().splitlines()
    return f"pytest does not run: {first_line(lines[-1]) if lines else 'it said nothing'}"


def _why(run: SuiteRun) -> str:
    messages = [*run.not_collected.values(), *(f.message for f in run.failures.values())]
    return first_line(messages[0]) if messages else "they are skipped"
