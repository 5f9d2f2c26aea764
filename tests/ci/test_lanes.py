"""The lanes of CI: each runs alone, together, and as the workflow calls it."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lanes
import pytest
import yaml
from flaky import DAYS, expired, read_entries
from lanes import Lane, Outcome, Runner


@pytest.fixture(autouse=True)
def _no_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Runner, "_make", lambda *_: 0)
    monkeypatch.setenv("ROLLART_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., Runner]:
    folder = tmp_path / "reports"
    folder.mkdir()
    return lambda **given: Runner(folder, **{"full": False, **given})


def program(code: str, *paths: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, "pytest", "-m", "marked", *paths)


REPORTS = """
import json, os, sys
def report(**line):
    with open(os.environ["ROLLART_TEST_REPORT"], "a") as file:
        file.write(json.dumps({"wall_s": 0.1, "cpu_s": 0.1, **line}) + "\\n")
"""
FAILS_ONCE = (
    REPORTS
    + """
if "tests/x.py" in sys.argv[-1] and "::" not in sys.argv[-1]:
    report(id="tests/x.py::a", outcome="passed")
    report(id="tests/x.py::b", outcome="failed", may_retry=MAY_RETRY, reason="late")
    sys.exit(1)
assert sys.argv[1:] == ["pytest", "-m", "marked", "tests/x.py::b"], sys.argv
report(id="tests/x.py::b", outcome="passed")
"""
)


@pytest.mark.parametrize("may_retry", [True, False])
@pytest.mark.parametrize("retries", [True, False])
def test_only_failures_of_time_in_lanes_with_real_components_run_once_more(
    runner: Callable[..., Runner], may_retry: bool, retries: bool
) -> None:
    code = FAILS_ONCE.replace("MAY_RETRY", str(may_retry))
    run = runner()
    outcomes = run.beside([Lane("x", (program(code, "tests/x.py"),), retries=retries)])
    assert [one.ok for one in outcomes] == [False]
    flaky = run.retry(outcomes)
    assert flaky == (["tests/x.py::b"] if may_retry and retries else [])
    assert outcomes[0].ok is (may_retry and retries)


def test_what_runs_once_more_is_run_by_its_own_command(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    passes = REPORTS + "if len(sys.argv) == 4: report(id='tests/w.py::a', outcome='passed')"
    fails_once = FAILS_ONCE.replace("MAY_RETRY", "True")
    lane = Lane("x", (program(passes), program(fails_once, "tests/x.py")), retries=True)
    run = runner()
    outcomes = run.beside([lane])
    assert [outcomes[0].count(how) for how in ("passed", "failed")] == [2, 1]
    assert run.retry(outcomes) == ["tests/x.py::b"]
    assert outcomes[0].ok


@pytest.mark.parametrize("name", ["properties", "test"])
def test_only_the_lane_properties_draws_other_examples_in_each_run(
    runner: Callable[..., Runner], repo_root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("ROLLART_TEST_EXAMPLES", raising=False)
    code = (
        f"import runpy; runpy.run_path({str(repo_root / 'tests/integration/conftest.py')!r})\n"
        "from hypothesis import settings\n"
        f"assert settings().derandomize is {name != 'properties'}"
    )
    lane = Lane("x", (program(code),), variables=lanes.ALL[name].variables)
    assert [one.ok for one in runner().beside([lane])] == [True]


def test_a_crash_of_the_test_runner_is_not_retried(runner: Callable[..., Runner]) -> None:
    code = FAILS_ONCE.replace("MAY_RETRY", "True").replace("sys.exit(1)", "os.abort()")
    run = runner()
    outcomes = run.beside([Lane("x", (program(code, "tests/x.py"),), retries=True)])
    assert run.retry(outcomes) == []
    assert not outcomes[0].ok


def test_lanes_run_beside_one_another_within_the_slots(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    # Each waits for the other: alone, neither would end.
    code = (
        "import sys, time, pathlib; mine, other = map(pathlib.Path, sys.argv[4:6]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)"
    )
    paths = [str(tmp_path / name) for name in ("a", "b")]
    both = [Lane("a", (program(code, *paths),)), Lane("b", (program(code, *reversed(paths)),))]
    assert [one.ok for one in runner().beside(both)] == [True, True]


def test_nothing_runs_after_a_gate_that_failed(runner: Callable[..., Runner]) -> None:
    fails = Lane("fails", (program("raise SystemExit(3)"),))
    outcomes = runner().gates([fails, Lane("never", (program("1"),))])
    assert [(one.lane.name, one.ok, one.note) for one in outcomes] == [
        ("fails", False, "exit code 3")
    ]


def test_a_lane_that_passed_is_skipped_until_what_it_depends_on_changes(
    runner: Callable[..., Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "stamp_of", lambda lane: tmp_path / "stamps" / lane.name)
    count = tmp_path / "count"
    lane = Lane("x", (program(f"open({str(count)!r}, 'a').write('1')"),), roots=("tests/x",))

    def runs(**given: bool) -> int:
        count.write_text("")
        (outcome,) = runner(**given).beside([lane])
        assert outcome.ok
        return len(count.read_text())

    assert [runs(), runs(), runs(full=True)] == [1, 0, 1]
    (tmp_path / "stamps" / "x").unlink()
    assert runs() == 1


def test_a_lane_that_failed_has_no_stamp(
    runner: Callable[..., Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "stamp_of", lambda lane: tmp_path / lane.name)
    runner().beside([Lane("x", (program("raise SystemExit(1)"),), roots=("tests/x",))])
    assert not (tmp_path / "x").exists()


def test_stamps_exist_only_where_a_lane_says_what_it_depends_on() -> None:
    stamped = {lane.name for lane in lanes.ALL.values() if lanes.stamp_of(lane)}
    assert stamped == {"adapters", "peers", "trackers", "verifiers", "agents", "sglang", "vllm"}


def test_the_table_has_a_row_for_each_lane() -> None:
    outcome = Outcome(Lane("ray", ()), True, "", 61.0, 30.0, [{"outcome": "passed"}] * 3)
    header, row = lanes.table([outcome])
    assert header.split() == ["lane", "wall", "CPU", "passed", "failed", "skipped"]
    assert row.split() == ["ray", "61s", "30s", "3", "0", "0"]


@pytest.mark.parametrize("given", [["nope"], ["ray", "docker", "-x"]])
def test_what_is_no_lane_is_refused(given: list[str], repo_root: Path) -> None:
    done = subprocess.run(
        ["bash", ".ci/run", *given], cwd=repo_root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout.startswith(".ci/run: ")
    assert len(done.stdout.splitlines()) == 1


def test_the_workflow_calls_exactly_the_lanes(repo_root: Path) -> None:
    workflow = yaml.safe_load((repo_root / ".github/workflows/ci.yml").read_text())
    called = set()
    for job in workflow["jobs"].values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        for command in commands:
            assert command.startswith(".ci/run "), command
        matrix = job.get("strategy", {}).get("matrix", {})
        for lane in matrix.get("lane", [None]):
            called |= {c.replace("${{ matrix.lane }}", str(lane)) for c in commands}
    wanted = [*lanes.GATES, *lanes.LANES, lanes.ALL["dist"]]
    assert called == {f".ci/run {lane.name}" for lane in wanted}


def test_each_marker_of_a_test_has_a_lane(repo_root: Path) -> None:
    import tomllib

    ini = tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["pytest"]
    markers = {line.partition(":")[0] for line in ini["ini_options"]["markers"]}
    selected = {
        word
        for lane in lanes.ALL.values()
        for command in lane.commands
        if "-m" in command
        for word in command[command.index("pytest") + 2].split(" and ")[0].split()
    }
    assert markers - {"gpu"} - selected == {"starts_normally"} & markers


def test_entries_of_flaky_tests_expire(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    table = tmp_path / "tests" / "flaky.md"
    table.write_text(
        "# x\n| test | since | cause |\n|---|---|---|\n| `a::b` | 2026-01-01 | why |\n"
    )
    (entry,) = read_entries(tmp_path)
    assert (entry.test, entry.cause) == ("a::b", "why")
    last = entry.since + datetime.timedelta(days=DAYS)
    assert expired(tmp_path, last) == []
    assert expired(tmp_path, last + datetime.timedelta(days=1)) == [entry]
    table.write_text("| `a::b` | 2026-01-01 | |\n")
    with pytest.raises(ValueError, match=r"flaky\.md:1"):
        read_entries(tmp_path)


def test_the_table_of_flaky_tests_can_be_read(repo_root: Path) -> None:
    read_entries(repo_root)


def test_interrupting_ends_all_that_runs(repo_root: Path, tmp_path: Path) -> None:
    code = (
        "import signal, sys; sys.path.insert(0, '.ci'); import lanes\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # as in the background of a script
        "from lanes import Lane, Runner, execute\n"
        "Runner._make = lambda *_: 0\n"
        "waits = (sys.executable, '-c', 'import time, os; print(os.getpid()); time.sleep(1e6)',"
        " 'pytest', '-m', 'x')\n"
        "sys.exit(execute([Lane('a', (waits,)), Lane('b', (waits,))], (), nightly=False))"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=repo_root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, "it ended by itself"
        pids += [int(word) for word in line.split()[-1:] if word.isdigit()]
    process.terminate()
    rest, _ = process.communicate()
    assert process.returncode == 130
    assert "all lanes have ended" in rest
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            import os

            os.kill(pid, 0)
