#!/usr/bin/env python3
"""The lanes of CI, and what runs them.

    .ci/run                 all that must pass before a change is taken
    .ci/run LANE...         these lanes alone, such as `.ci/run ray`
    .ci/run nightly         all lanes, and what is too long for every change
    .ci/run LANE ARG...     further arguments of pytest, for one lane: `.ci/run ray -k resume -x`
    .ci/run --list          the lanes
    .ci/run --slowest FILE  all, and a table of the 50 slowest tests to a file; also before lanes

Lint, types and the default tests come first: if they fail, nothing else runs. The other lanes then
share the machine. A lane that names what it depends on is skipped if none of it has changed since
the lane last passed here (FULL=1 runs it all the same). In lanes with real components a test that
failed by time or availability runs once more, alone, at the end. If it passes, it is listed as
flaky, and tests/flaky.md needs an entry for it.

Environment: FULL=1; ROLLART_CACHE (dependencies and stamps; default: rollart in the user's cache
folder); ROLLART_TEST_TIMEOUT_SCALE (multiplies all timeouts of tests; default: 3).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from closure import Closure, fingerprint
from dependencies import cache_folder, interpreter
from flaky import expired, read_entries

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ".venv/bin/python"
DEV = ".venv/.set-up-to-test"
WHEELS = ".wheelhouse/.complete-to-train"
ADAPTERS, AGENTS = ".venv-adapters/.set-up", ".venv-agents/.set-up"
MOST_FLAKY = 3
COMMAND = "command"
"""Key of a test's line: the number of the command of its lane that ran it."""
TIMEOUT_SCALE = "3"
"""Unless the caller sets another: lanes share the machine, and a limit is there to end a hang."""
GRACE_S = 60
"""How long lanes have to end after Ctrl-C, before they are killed."""


@dataclass(frozen=True)
class Lane:
    """Tests that run together, or another check.

    Attributes:
        name: As in ``.ci/run NAME``; tests see it as ``ROLLART_LANE``.
        commands: What it runs, one after another; pytest's come first.
        needs: Targets of make that it needs, besides the development environment.
        slots: How many of the machine's slots it takes.
        retries: Whether failures of time or availability run once more.
        roots: Files and folders it depends on, with all they import. Empty: it always runs.
        variables: Environment variables of its commands, such as ``NAME=value``.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()
    slots: int = 1
    retries: bool = False
    roots: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


def pytest(marks: str, *more: str, python: str = PYTHON) -> tuple[str, ...]:
    """Return a command that runs the tests with these marks."""
    return (python, "-m", "pytest", "-m", marks, *more)


SLOTS = 3
"""Lanes with real components leave a processor idle for most of the time."""
ELSEWHERE = (
    "gpu or ray or docker or sglang or vllm or agents or adapters or peers or nightly or bench"
)
ENGINE = ("tests/docker/engine", "run")
BENCH = ("tests/bench", "plugins/rollart_bench")
"""Benchmarks are found by the files in their folder; no import names them."""
PACKAGES = (
    "tests/integration/plugins/trackers",
    "tests/integration/plugins/view/test_export_datasets.py",
)
"""Tests that are skipped where the packages they are for are not installed."""
TWO = ("-p", "xdist", "-n", "2", "--dist", "loadfile")
STATISTICS = "--hypothesis-show-statistics"
"""Prints how many examples each property test really tried, at the end of the lane's log."""
BUILD_AND_CHECK = (
    'dist=$(mktemp -d) && trap "rm -rf $dist" EXIT && '
    ".venv/bin/python -m build --outdir $dist && .ci/check-dist $dist"
)
GATES = (
    Lane("check", (("make", "check"),), slots=SLOTS),
    Lane("test", (("make", "test"),), slots=SLOTS),
)
"""They run first, alone; if one fails, no other lane runs."""
LANES = (
    Lane(
        "slow",
        ((*pytest(f"slow and not ({ELSEWHERE})"), *TWO),),
        needs=(WHEELS,),
        slots=2,
    ),
    Lane("ray", (pytest("ray and not nightly"),), retries=True),
    Lane(
        "docker",
        (
            (*ENGINE, *pytest("docker and not nightly")),
            (*ENGINE, *pytest("bench", "tests/bench", "-k", "sandbox or isolation or mission")),
        ),
        needs=(WHEELS,),
        retries=True,
    ),
    Lane("bench", (pytest("bench", "tests/bench"),)),
    Lane(
        "sglang",
        (pytest("sglang and not nightly", "tests/sglang_cpu"),),
        needs=(".venv-sglang/.set-up",),
        retries=True,
        roots=("tests/sglang_cpu",),
    ),
    Lane(
        "vllm",
        (pytest("vllm and not nightly", "tests/vllm_cpu"),),
        needs=(".venv-vllm/.set-up",),
        retries=True,
        roots=("tests/vllm_cpu",),
    ),
    Lane(
        "adapters",
        (
            pytest("adapters", "tests/adapters", python=".venv-adapters/bin/python"),
            pytest("adapters and not nightly", "tests/adapters/test_real_runs.py"),
            pytest("bench", "tests/bench", "-k", "adapters", python=".venv-adapters/bin/python"),
        ),
        needs=(ADAPTERS,),
        roots=("tests/adapters", *BENCH),
    ),
    Lane(
        "verifiers",
        (pytest("adapters", "tests/verifiers", python=".venv-verifiers/bin/python"),),
        needs=(".venv-verifiers/.set-up",),
        roots=("tests/verifiers",),
    ),
    Lane(
        "trackers",
        (pytest("not gpu", *PACKAGES, python=".venv-trackers/bin/python"),),
        needs=(".venv-trackers/.set-up",),
        roots=PACKAGES,
    ),
    Lane(
        "peers",
        (
            pytest("peers", "tests/peers", python=".venv-peers/bin/python"),
            pytest("bench", "tests/bench", "-k", "loop", python=".venv-peers/bin/python"),
        ),
        needs=(".venv-peers/.set-up",),
        roots=("tests/peers", *BENCH),
    ),
    Lane(
        "agents",
        (pytest("agents and not nightly", "tests/agents"),),
        needs=(AGENTS,),
        roots=("tests/agents", "examples/mini_swe_agent", "examples/openai_agent"),
    ),
)
ON_REQUEST = (
    Lane(
        "long",
        (
            (*pytest("nightly and not docker", STATISTICS), *TWO),
            (*ENGINE, *pytest("nightly and docker")),  # one after another: they count containers
        ),
        needs=(WHEELS, ADAPTERS, AGENTS),
        slots=2,
    ),
    Lane(
        "properties",
        ((*pytest("hypothesis", STATISTICS), *TWO),),
        slots=2,
        variables=("ROLLART_TEST_EXAMPLES=random",),
    ),
    Lane("dist", (("bash", "-c", BUILD_AND_CHECK),)),
    Lane("site", (("make", "site"),)),
)
"""They run in ``.ci/run nightly``, or by their names."""
NIGHTLY = (*LANES, *ON_REQUEST)
ALL = {lane.name: lane for lane in (*GATES, *NIGHTLY)}


@dataclass
class Outcome:
    """How a lane ended.

    Attributes:
        lane: Which.
        ok: Whether it passed, or had nothing to do.
        note: Why it failed or was skipped.
        wall_s: From its start, setting up included.
        cpu_s: Of all its processes that were waited for.
        tests: The line of each test (``tests/support/report.py``).
        again: Tests that may run once more, each with the number of its command.
    """

    lane: Lane
    ok: bool = False
    note: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    tests: list[dict[str, object]] = field(default_factory=list)
    again: list[tuple[int, str]] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Return how many tests ended so."""
        return sum(test["outcome"] == outcome for test in self.tests)


class Runner:
    """Runs lanes beside one another, and ends them all on Ctrl-C."""

    def __init__(self, folder: Path, *, full: bool, arguments: Sequence[str] = ()) -> None:
        """Run nothing yet.

        Args:
            folder: For the reports of tests.
            full: Whether lanes run in which nothing has changed.
            arguments: Further arguments of pytest.
        """
        self._folder = folder
        self._full = full
        self._arguments = tuple(arguments)
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Condition()
        self._free = SLOTS
        self._ended = False

    def gates(self, lanes: Sequence[Lane]) -> list[Outcome]:
        """Run lanes one after another, until one fails."""
        outcomes: list[Outcome] = []
        for lane in lanes:
            outcomes.append(self._run(lane))
            if not outcomes[-1].ok:
                break
        return outcomes

    def beside(self, lanes: Sequence[Lane]) -> list[Outcome]:
        """Run lanes beside one another, in this order as slots become free."""
        outcomes = [Outcome(lane) for lane in lanes]
        threads = []
        for index, lane in enumerate(lanes):
            self._take(lane.slots)
            if self._ended:
                break
            thread = threading.Thread(target=self._into, args=(outcomes, index), name=lane.name)
            thread.start()
            threads.append(thread)
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)  # so that Ctrl-C is noticed
        return outcomes

    def retry(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Run once more, alone, what may be; return the tests that then passed."""
        flaky: list[str] = []
        for outcome in outcomes:
            if not outcome.again:
                continue
            passed = [name for at, name in outcome.again if self._once_more(outcome.lane, at, name)]
            flaky += passed
            if len(passed) == len(outcome.again):
                outcome.ok, outcome.note = True, f"{len(passed)} flaky"
        return flaky

    def end(self) -> None:
        """Interrupt all that runs, and kill what does not end."""
        self._ended = True
        with self._lock:
            running = list(self._running)
            self._lock.notify_all()
        for how in (signal.SIGINT, signal.SIGKILL):
            for process in running:
                if process.poll() is None:
                    signal_group(process.pid, how)
            until = time.monotonic() + GRACE_S
            while any(p.poll() is None for p in running) and time.monotonic() < until:
                time.sleep(0.1)

    def _take(self, slots: int) -> None:
        with self._lock:
            while self._free < slots and not self._ended:
                self._lock.wait(1.0)
            self._free -= slots

    def _into(self, outcomes: list[Outcome], index: int) -> None:
        lane = outcomes[index].lane
        try:
            outcomes[index] = self._run(lane)
        finally:
            with self._lock:
                self._free += lane.slots
                self._lock.notify_all()

    def _run(self, lane: Lane) -> Outcome:
        began = time.monotonic()
        outcome = Outcome(lane)
        stamp = stamp_of(lane)
        if stamp is not None and stamp.exists() and not self._full and not self._arguments:
            since = time.strftime("%d %B, %H:%M", time.localtime(stamp.stat().st_mtime))
            outcome.ok, outcome.note = True, f"nothing has changed since it passed on {since}"
            say(lane.name, f"skipped: {outcome.note} (FULL=1 runs it)")
            return outcome
        say(lane.name, "begins")
        codes = [self._make(lane, outcome)]
        if codes == [0]:
            codes = [self._command(number, outcome) for number in range(len(lane.commands))]
        outcome.wall_s = time.monotonic() - began
        outcome.ok = not any(codes)
        if not outcome.ok:
            outcome.note = f"exit code {next(filter(None, codes))}"
            outcome.again = tests_to_retry(lane, outcome.tests, codes)
        elif stamp is not None and not self._arguments:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
        say(lane.name, f"{'passed' if outcome.ok else 'FAILED'} after {outcome.wall_s:.0f} s")
        return outcome

    def _command(self, number: int, outcome: Outcome) -> int:
        """Run a command of a lane and note its tests; return its exit code."""
        report = self._folder / f"{outcome.lane.name}-{number}.jsonl"
        code = self._execute(outcome.lane, outcome.lane.commands[number], report, outcome)
        outcome.tests += [{**line, COMMAND: number} for line in read_report(report)]
        return code

    def _make(self, lane: Lane, outcome: Outcome) -> int:
        if lane.commands[0][0] == "make":
            return 0
        with locked_setup:
            return self._execute(lane, ("make", DEV, *lane.needs), None, outcome)

    def _execute(
        self, lane: Lane, command: Sequence[str], report: Path | None, outcome: Outcome
    ) -> int:
        """Run one command; each line that it prints has the lane's name before it."""
        if self._ended:
            return 130
        environment = {**os.environ, "ROLLART_LANE": lane.name, "PYTHONUNBUFFERED": "1"}
        environment |= dict(variable.split("=", 1) for variable in lane.variables)
        environment.pop("FULL", None)
        environment.setdefault("ROLLART_TEST_TIMEOUT_SCALE", TIMEOUT_SCALE)
        if report is not None:
            environment["ROLLART_TEST_REPORT"] = str(report)
            command = [*command, *self._arguments]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches it once, from here
        )
        with self._lock:
            self._running.add(process)
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                say(lane.name, line.rstrip("\n"))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        with self._lock:
            self._running.discard(process)
        outcome.cpu_s += usage.ru_utime + usage.ru_stime
        return process.returncode

    def _once_more(self, lane: Lane, number: int, test: str) -> bool:
        say(lane.name, f"once more, alone: {test}")
        command, outcome = lane.commands[number], Outcome(lane)
        marks = command.index("-m", command.index("pytest")) + 1
        command = command[: marks + 1]  # without its paths
        report = self._folder / f"{lane.name}-again.jsonl"
        report.unlink(missing_ok=True)
        code = self._execute(lane, [*command, test], report, outcome)
        lines = read_report(report)
        return code == 0 and [(line["id"], line["outcome"]) for line in lines] == [(test, "passed")]


locked_setup = threading.Lock()
"""Held while a lane's environments are made: two of them want the same one."""


def stamp_of(lane: Lane) -> Path | None:
    """Return the file that is there if the lane has passed with all that it depends on."""
    if not lane.roots:
        return None
    files = Closure(ROOT).files([*lane.roots, "Makefile", "pyproject.toml", ".ci"])
    told = [*interpreter(), platform.machine(), lane.commands, lane.needs]
    return cache_folder() / "stamps" / f"{lane.name}-{fingerprint(ROOT, files, told)}"


def read_report(path: Path) -> list[dict[str, object]]:
    """Return the line of each test; none if no test ran."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tests_to_retry(
    lane: Lane, tests: Sequence[dict[str, object]], codes: Sequence[int]
) -> list[tuple[int, str]]:
    """Return the failed tests, with their commands, if all of them may run once more; else none."""
    failed = [test for test in tests if test["outcome"] == "failed"]
    known = lane.retries and set(codes) <= {0, 1}  # any other code: pytest itself has failed
    if not known or not failed or not all(test.get("may_retry") for test in failed):
        return []
    return [(int(str(test[COMMAND])), str(test["id"])) for test in failed]


def signal_group(pid: int, how: int) -> None:
    """Send a signal to a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, how)


def say(lane: str, line: str) -> None:
    """Print a line of a lane."""
    print(f"{lane}: {line}", flush=True)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each lane, and for the whole."""
    lines = [f"{'lane':<12}{'wall':>8}{'CPU':>8}{'passed':>8}{'failed':>8}{'skipped':>9}"]
    for one in outcomes:
        counts = [one.count(how) for how in ("passed", "failed", "skipped")]
        note = one.note or ("" if one.ok else "did not run")
        lines.append(
            f"{one.lane.name:<12}{one.wall_s:>7.0f}s{one.cpu_s:>7.0f}s"
            f"{counts[0]:>8}{counts[1]:>8}{counts[2]:>9}  {note}".rstrip()
        )
    return lines


def slowest(outcomes: Sequence[Outcome], most: int = 50) -> list[str]:
    """Return the slowest tests of all lanes, as rows of a table in Markdown."""
    tests = [(one.lane.name, test) for one in outcomes for test in one.tests]
    tests.sort(key=lambda pair: -float(str(pair[1]["wall_s"])))
    rows = [f"| {t['wall_s']} | {t['cpu_s']} | {lane} | `{t['id']}` |" for lane, t in tests[:most]]
    return ["| wall s | CPU s | lane | test |", "|---:|---:|---|---|", *rows]


def interrupt(number: int, frame: object) -> NoReturn:
    """End by a signal as by Ctrl-C."""
    raise KeyboardInterrupt


def execute(
    chosen: Sequence[Lane],
    arguments: Sequence[str],
    *,
    nightly: bool,
    table_path: Path | None = None,
) -> int:
    """Run lanes and print how they ended; return the exit code."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rollart-ci-"))
    runner = Runner(folder, full=bool(os.environ.get("FULL")) or nightly, arguments=arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(number, interrupt)
    try:
        gates = [lane for lane in chosen if lane in GATES]
        outcomes = runner.gates(gates)
        others = [lane for lane in chosen if lane not in GATES]
        if all(one.ok for one in outcomes):
            outcomes += runner.beside(others)
        else:
            outcomes += [Outcome(lane) for lane in others]
        flaky = runner.retry(outcomes)
    except KeyboardInterrupt:
        runner.end()
        print("interrupted: all lanes have ended", flush=True)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = [one.lane.name for one in outcomes if not one.ok]
    if table_path is not None:
        table_path.write_text("\n".join(slowest(outcomes)) + "\n", encoding="utf-8")
    print("\n".join(["", *table(outcomes)]))
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, cpu = time.monotonic() - began, usage.ru_utime + usage.ru_stime
    print(f"{wall / 60:.1f} minutes, {cpu / 60:.1f} of processor time")
    for test in outcomes:
        for line in test.tests:
            if line["outcome"] == "failed" and line["id"] not in flaky:
                print(f"failed: {line['id']}: {line.get('reason')}")
    entries = {one.test for one in read_entries(ROOT)}
    for name in flaky:
        hint = "" if name in entries else " (add its cause to tests/flaky.md)"
        print(f"flaky: {name}{hint}")
    if len(flaky) > MOST_FLAKY:
        failed.append(f"{len(flaky)} flaky tests, more than {MOST_FLAKY}")
    if nightly:
        failed += [f"{one.test}: its entry in tests/flaky.md has expired" for one in expired(ROOT)]
    if failed:
        print(f"not passed: {', '.join(failed)}")
    counts = [sum(one.count(how) for one in outcomes) for how in ("passed", "failed", "skipped")]
    print(f"{counts[0] + len(flaky)} passed, {counts[1] - len(flaky)} failed, {counts[2]} skipped")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    if "--list" in arguments:
        print("\n".join(ALL))
        return 0
    table_path = None
    if arguments[:1] == ["--slowest"]:
        table_path, arguments = Path(arguments[1]).absolute(), arguments[2:]
    os.chdir(ROOT)
    names = [name for name in arguments if name in ALL]
    further = list(arguments[len(names) :])
    if arguments[:1] == ["nightly"]:
        return execute((*GATES, *NIGHTLY), (), nightly=True, table_path=table_path)
    if arguments and (not names or list(arguments[: len(names)]) != names):
        print(f".ci/run: there is no lane {arguments[0]!r}: {', '.join(ALL)}, nightly")
        return 2
    if further and len(names) != 1:
        print(".ci/run: further arguments are for one lane alone")
        return 2
    chosen = [ALL[name] for name in names] or [*GATES, *LANES]
    return execute(chosen, further, nightly=False, table_path=table_path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
