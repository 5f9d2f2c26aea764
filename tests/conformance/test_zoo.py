"""Every check can fail: for each there is a plugin that breaks its rule, and no other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zoo
from support.pace import scaled

from rollart_core.cli import main
from rollart_core.contracts.env import Timeouts
from rollart_core.errors import UserError
from rollart_core.plugins.api_version import as_today
from rollart_core.plugins.manager import using
from rollart_testing import CheckOutcome, check_env, runtime_checks, split_checks
from rollart_testing.check import check, offline, process
from rollart_testing.check.catalogue import (
    ENVIRONMENT_RUNTIME,
    ENVIRONMENT_SEMANTIC,
    PACKAGE,
    PARTS,
    STATIC,
)
from rollart_testing.check.process import environ
from rollart_testing.check.report import Report
from rollart_testing.env_checks import CHECKS, run_env_checks
from rollart_testing.env_play import EnvSubject


@pytest.fixture(autouse=True)
def swept():
    """Take away what leaky environments leave behind."""
    yield
    zoo.sweep()


@pytest.fixture
def no_grace(monkeypatch):
    """What stays for good is not waited for."""
    monkeypatch.setattr(runtime_checks, "GRACE_S", 0.0)


def ended(results, outcome):
    return [r.name for r in results if r.outcome is outcome]


# --- In one process -----------------------------------------------------------------------------

BROKEN: list[tuple[type, str, dict[str, object]]] = [
    (zoo.CannotBeMade, "make", {}),
    (zoo.BareReset, "reset", {}),
    (zoo.NumberObservation, "reset", {}),
    (zoo.FourTuple, "step", {}),
    (zoo.TextReward, "step", {}),
    (zoo.Leaves, "step", {}),
    (zoo.IntFlags, "step", {}),
    (zoo.NoTasks, "tasks", {}),
    (zoo.LacksASplit, "tasks", {}),
    (zoo.ForgetsAProduct, "tasks", {}),
    (zoo.Numbered, "same_seed_same_episode", {}),
    (zoo.ForgetsToReset, "reset_in_the_middle", {}),
    (zoo.NeverSeeds, "gymnasium_check_env", {}),
    (zoo.SeedsTheWorld, "global_random_state", {}),
    (zoo.OneForAll, "interleaved_instances", {}),
    (zoo.AsyncDiffers, "async_agrees", {}),
    (zoo.AstepAlone, "async_agrees", {}),
    (zoo.OracleRaises, "step", {}),
    (zoo.NoCorpus, "corpus", {}),
    (zoo.LeavesThreads, "nothing_left_open", {}),
    (zoo.LeavesFiles, "nothing_left_open", {}),
    (zoo.LeavesASandbox, "no_box_left", {}),
    (zoo.SlowOnce, "within_timeouts", {"timeouts": Timeouts(step_s=0.05)}),
    (zoo.ClosesOnce, "close_twice", {}),
    (zoo.OneListForAll, "splits_differ", {}),
    (zoo.FewSeeds, "splits_differ", {}),
    (zoo.SharesAProduct, "splits_differ", {}),
    (zoo.PoorOracle, "oracle_reaches_the_top", {}),
    (zoo.PaysIdlers, "noop_stays_at_the_floor", {}),
    (zoo.PaysAnyone, "random_stays_below_the_oracle", {}),
    (zoo.PaysOnce, "same_verdict_twice", {}),
    (zoo.AnswersOnlyErrors, "secrets_are_hidden", {}),
    (zoo.AnswersInInfo, "secrets_are_hidden", {}),
    (zoo.SecretsInInfo, "secrets_are_hidden", {}),
    (zoo.SecretsInTheSandbox, "box_hides_secrets", {}),
    (zoo.Fragile, "malformed_actions", {}),
    (zoo.Fines, "reward_in_range", {}),
    (zoo.PaysAnyCall, "random_stays_below_the_oracle", {}),
    (zoo.PaysAnyCallBeforeAWord, "random_stays_below_the_oracle", {}),
    (zoo.ToolTellsSecrets, "secrets_are_hidden", {}),
    (zoo.Divides, "malformed_actions", {}),
]


def test_the_good_one_passes_every_check_of_check_env():
    results = check_env(zoo.Good, spec=zoo.env_spec("Good"))
    assert ended(results, CheckOutcome.PASS) == list(CHECKS)


def test_the_good_one_with_tools_passes_every_check_of_check_env():
    results = check_env(zoo.GoodTools, spec=zoo.env_spec("GoodTools", tools=True))
    lacks = {"async_agrees", "corpus"}
    assert ended(results, CheckOutcome.PASS) == [name for name in CHECKS if name not in lacks], (
        results
    )
    (remark,) = [r.reason for r in results if r.name == "random_stays_below_the_oracle"]
    assert "random calls earn 0%" in remark


def test_what_a_plugin_raises_is_named_with_file_and_line():
    (result,) = check_env(zoo.OracleRaises, only=["step"])
    assert re.fullmatch(
        r"oracle\(\) raised KeyError: 'blue' \(.*zoo\.py:\d+ in oracle\)", result.reason
    )
    (result,) = check_env(zoo.Divides, only=["malformed_actions"])
    assert result.reason.startswith('after ask({"door": 0}): step raised ZeroDivisionError')
    assert result.reason.endswith(" in share)")


def test_an_environment_that_knows_its_tasks_by_the_seed_has_others_in_each_split(monkeypatch):
    spec = zoo.env_spec("BySeed")
    (result,) = check_env(zoo.BySeed, spec=spec, only=["splits_differ"])
    assert result.outcome is CheckOutcome.PASS
    # As seeds were in earlier releases.
    monkeypatch.setattr(split_checks, "task_seed", lambda seed, split, index: seed + index)
    (result,) = check_env(zoo.BySeed, spec=spec, only=["splits_differ"])
    assert result.outcome is CheckOutcome.FAIL
    assert "40 of 40 tasks of test are tasks of train: task 0 of test is task 0" in result.reason


def test_splits_that_may_share_tasks_are_not_judged():
    spec = zoo.env_spec("OneListForAll", disjoint_splits=False)
    (result,) = check_env(zoo.OneListForAll, spec=spec, only=["splits_differ"])
    assert result.outcome is CheckOutcome.SKIP
    assert "5 of 5 tasks of test are tasks of train" in result.reason


def test_success_that_the_spec_denies_is_seen():
    class Succeeds(zoo.Good):
        def info(self):
            return {**super().info(), "success": self.right == 2}

    for reports, outcome in ((True, CheckOutcome.PASS), (False, CheckOutcome.FAIL)):
        spec = zoo.env_spec("Good", reports_success=reports)
        (result,) = check_env(Succeeds, spec=spec, only=["oracle_reaches_the_top"])
        assert result.outcome is outcome, result.reason
    assert "reports_success: false" in result.reason


def test_a_plugin_of_version_1_could_not_say_that_its_splits_share_tasks():
    spec = as_today(zoo.env_spec("OneListForAll", contract_version=1))
    (result,) = check_env(zoo.OneListForAll, spec=spec, only=["splits_differ"])
    assert result.outcome is CheckOutcome.SKIP


def test_the_same_first_pages_of_other_tasks_are_no_breach():
    class AsksLater(zoo.Good):
        def page(self):
            return "Ready?" if self.turn == 0 else super().page()

        def secrets(self):
            return []

    (result,) = check_env(AsksLater, spec=zoo.env_spec("AsksLater"), only=["splits_differ"])
    assert result.outcome is CheckOutcome.PASS, result.reason


@pytest.mark.parametrize(
    ("broken", "name", "said"), BROKEN, ids=lambda v: getattr(v, "__name__", "")
)
def test_exactly_that_check_fails(broken, name, said, request):
    if name == "nothing_left_open":
        request.getfixturevalue("no_grace")
    results = check_env(broken, spec=zoo.env_spec(broken.__name__, **said))
    assert ended(results, CheckOutcome.FAIL) == [name], results


@pytest.mark.usefixtures("no_grace")
def test_left_processes_are_found_and_named():
    results = check_env(zoo.LeavesProcesses, only=["nothing_left_open"])
    assert "5 processes more (sleep)" in results[0].reason


def test_what_ends_a_moment_later_is_not_left(monkeypatch):
    num_looks, real = 0, runtime_checks.census

    def census():
        nonlocal num_looks
        num_looks += 1
        if num_looks == 4:  # one before the rounds, two after them that see all threads
            zoo.sweep()
        return real()

    monkeypatch.setattr(runtime_checks, "census", census)
    results = check_env(zoo.LeavesThreads, only=["nothing_left_open"])
    assert ended(results, CheckOutcome.PASS) == ["nothing_left_open"], results


@pytest.mark.usefixtures("no_grace")
def test_what_begins_once_and_stays_is_not_left_by_each_round(monkeypatch):
    monkeypatch.setattr(zoo.BeginsAPool, "resets", 0)
    results = check_env(zoo.BeginsAPool, only=["nothing_left_open"])
    assert ended(results, CheckOutcome.PASS) == ["nothing_left_open"], results
    assert zoo.BeginsAPool.resets > 7


def test_a_slow_one_is_played_less_and_the_pass_says_so():
    class Slow(zoo.Good):
        def reset(self, **kwargs):
            time.sleep(0.02)
            return super().reset(**kwargs)

    subject = EnvSubject(Slow, zoo.env_spec("Slow"), budget_s=0.05)
    results = run_env_checks(subject, only=["interleaved_instances", "oracle_reaches_the_top"])
    assert ended(results, CheckOutcome.FAIL) == []
    remarks = {r.name: r.reason for r in results}
    assert re.match(r"\d instances, not 64: an episode takes", remarks["interleaved_instances"])
    assert re.match(r"[2-4] of 6 tasks", remarks["oracle_reaches_the_top"])


# --- In several processes -----------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch):
    """The zoo, registered as a plugin under development is."""
    monkeypatch.setenv("ROLLART_PLUGINS", "zoo")
    with using({}):
        yield


def checked(name: str, *only: str) -> tuple[Report, list[str]]:
    report = check(f"zoo/{name}-v1", only=only or ("runtime", "semantic"), timeout_s=scaled(100))
    return report, ended(report.results, CheckOutcome.FAIL)


def reason(report: Report, name: str) -> str:
    return next(r.reason for r in report.results if r.name == name)


@pytest.mark.usefixtures("registered")
def test_the_order_of_a_set_is_found():
    report, failed = checked("HashOrder", "runtime")
    assert failed == ["fresh_processes_agree"]
    assert "turn 0: observation" in reason(report, "fresh_processes_agree")
    assert not report.passed


@pytest.mark.usefixtures("registered")
def test_a_hanging_step_is_ended_and_named():
    report, failed = checked("Hangs")
    assert failed == ["within_timeouts"]
    assert reason(report, "within_timeouts") == "step did not return within 0.1 s (in step)"
    assert reason(report, "corpus").startswith("not run: step did not return")


@pytest.mark.usefixtures("registered")
def test_a_crash_is_named_with_its_last_words():
    report, failed = checked("Crashes")
    assert failed == ["step"]
    assert reason(report, "step") == "its process ended with code 3: out of order"


@pytest.mark.usefixtures("registered")
def test_the_time_for_all_checks_is_a_limit(monkeypatch):
    passed_s = 0.0

    def late(watch, limits):
        nonlocal passed_s
        if watch.call() is not None:  # it is being made
            passed_s = 600.0

    monkeypatch.setattr(process, "_late", late)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(process, "time", clock)
    report = check("zoo:HangsWhenMade", only=["runtime"], timeout_s=600)
    assert ended(report.results, CheckOutcome.FAIL) == ["make"]
    assert "--timeout" in reason(report, "make")


@pytest.mark.usefixtures("registered")
def test_who_needs_the_network_is_found_and_who_needs_the_loopback_is_not():
    if not offline.prefix()[0]:
        pytest.skip(offline.prefix()[1])
    assert checked("ServesItself", "works_offline")[1] == []
    try:
        zoo.CallsHome().reset()
    except OSError:
        pytest.skip("this machine has no network that could be turned off")
    report, failed = checked("CallsHome", "works_offline", "fresh_processes_agree")
    assert failed == ["works_offline"]
    assert "unreachable" in reason(report, "works_offline")


def test_a_reward_is_checked_in_a_process_of_its_own():
    report = check("zoo:Wavers")
    assert ended(report.results, CheckOutcome.FAIL) == ["same_request_same_score"]
    assert {r.group for r in report.results if r.outcome is CheckOutcome.PASS} == {
        "runtime",
        "semantic",
    }


def test_the_command_prints_a_table_or_json_and_exits_by_the_verdict(monkeypatch, capsys):
    def rollart(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["rollart", "check", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), capsys.readouterr().out

    code, out = rollart("colocate", "--only", "make,refuses_no_pools", "--json")
    assert (code, json.loads(out)["counts"]) == (0, {"PASS": 2, "FAIL": 0, "SKIP": 0})
    code, out = rollart("zoo:Wavers", "--only", "semantic")
    assert code == 1
    assert "1 PASS, 1 FAIL, 1 SKIP. zoo:Wavers did not pass: same_request_same_score." in out


def test_a_child_ends_with_its_parent(tmp_path):
    code = (
        "import json, sys, subprocess, os\n"
        "child = subprocess.Popen([sys.executable, '-m', 'rollart_testing.check.child'],"
        " stdin=subprocess.PIPE)\n"
        "job = {'fd': 1, 'kind': 'environments', 'id': 'zoo:HangsWhenMade', 'options': {},"
        f" 'watch': {str(tmp_path / 'watch')!r}, 'transcript': False, 'checks': ['make']}}\n"
        "child.stdin.write(json.dumps(job).encode() + b'\\n'); child.stdin.flush()\n"
        "os.close(1); os._exit(0)\n"
    )
    (tmp_path / "watch").write_bytes(bytes(64))
    # stdout ends when both have: were the child to stay, this would time out.
    subprocess.run(
        [sys.executable, "-c", code],
        env=environ([]),
        stdout=subprocess.PIPE,
        check=True,
        timeout=scaled(100),
    )


# --- Packages -----------------------------------------------------------------------------------

ENV_SOURCE = """
    from zoo import Good

    class Sums(Good):
        '''Two sums.'''
"""
HOOKS = """
    from rollart_core.plugins.hookspecs import hookimpl
    from rollart_core.plugins.manifest import specs

    @hookimpl
    def rollart_environments():
        return specs(__package__, "environments")
"""
MANIFEST = """
    contract_version: 2
    licence: MIT
    environments:
      - id: acme/Sums-v1
        entry_point: acme_sums.env:Sums
        summary: Two sums.
"""
TESTS = """
    from acme_sums.env import Sums
    from rollart_core import make
    from rollart_testing.check import check

    def test_it_asks():
        assert Sums().reset()[0].startswith("What is ")

    def test_it_is_registered():
        assert isinstance(make("acme/Sums-v1"), Sums)
"""
PYPROJECT = """
    [project]
    name = "acme-sums"
    version = "0.3"
    license = "MIT"
    dependencies = ["rollart>=0.1"]

    [project.entry-points.rollart]
    acme-sums = "acme_sums.plugin"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder that passes, its package in src."""
    folder = tmp_path / "acme-sums"
    files = {
        "pyproject.toml": PYPROJECT,
        "LICENSE": "MIT License\n",
        "src/acme_sums/__init__.py": "",
        "src/acme_sums/env.py": ENV_SOURCE,
        "src/acme_sums/plugin.py": HOOKS,
        "src/acme_sums/rollart.yaml": MANIFEST,
        "tests/test_sums.py": TESTS,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(project: Path) -> None:
        path = project / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def eager(project: Path, module: str) -> None:
    """Let the hooks import a module at once; it is a light one, whatever its name says."""
    edit("src/acme_sums/env.py", "from zoo import Good", "Good = object")(project)
    (project / "src" / "docker.py").write_text("")
    line = "\nfrom rollart_core.plugins.manifest"
    edit(PLUGIN, line, f"\nimport {module}{line}")(project)


PLUGIN, YAML = "src/acme_sums/plugin.py", "src/acme_sums/rollart.yaml"
FLAWED: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "contract_version",
        edit(YAML, "contract_version: 2", "contract_version: 99"),
        "acme_sums/rollart.yaml has contract version 99, this RollArt supports 1",
    ),
    ("manifest", lambda project: (project / YAML).unlink(), "no rollart.yaml in package"),
    ("manifest", edit(YAML, "summary:", "sumary:"), "Did you mean 'summary'"),
    (
        "manifest_agrees",
        edit(
            PLUGIN,
            'specs(__package__, "environments")',
            '[__import__("dataclasses").replace(s, max_turns=3)'
            ' for s in specs(__package__, "environments")]',
        ),
        "acme/Sums-v1: max_turns differ between rollart.yaml and the hook",
    ),
    (
        "entry_point",
        edit(PLUGIN, 'specs(__package__, "environments")', "[]"),
        "its hooks return nothing",
    ),
    ("entry_point", edit("pyproject.toml", "rollart]", "rolart]"), "no entry point in group"),
    ("entry_point", edit(PLUGIN, "import specs", "import specks"), "cannot import acme_sums"),
    ("entry_point", edit(PLUGIN, "rollart_env", "rollart_enw"), "there is no hook"),
    ("pins", edit("pyproject.toml", "rollart>=0.1", "rollart"), "rollart has no version"),
    (
        "pins",
        edit("pyproject.toml", "rollart>=0.1", "rollart @ https://example.org/rollart.whl"),
        "rollart is a direct URL",
    ),
    ("lazy_import", lambda project: eager(project, "acme_sums.env"), "imports acme_sums.env"),
    ("lazy_import", lambda project: eager(project, "docker"), "imports docker"),
    (
        "import_time",
        edit(
            PLUGIN,
            "@hookimpl",
            "import time\nend = time.process_time() + 0.31\n"
            "while time.process_time() < end: pass\n@hookimpl",
        ),
        "s of CPU, over 0.3 s",
    ),
    ("licence", edit("pyproject.toml", 'license = "MIT"', ""), "has no licence"),
    ("licence", edit(YAML, "MIT", "Apache-2.0"), "the metadata says MIT"),
    ("licence", edit(YAML, "MIT", "as you like"), "not an SPDX expression"),
    ("licence", lambda project: (project / "LICENSE").unlink(), "no LICENSE file"),
]


@pytest.mark.parametrize(("name", "change", "why"), FLAWED, ids=[name for name, *_ in FLAWED])
def test_exactly_that_static_check_fails(project, name, change, why):
    change(project)
    report = check(str(project), only=["static"])
    assert ended(report.results, CheckOutcome.FAIL) == [name], report.results
    assert why in reason(report, name)
    assert not report.passed


def own_tests(project, text=None):
    """Return what the check of a project's own tests says."""
    if text is not None:
        (project / "tests" / "test_sums.py").write_text(textwrap.dedent(text))
    (result,) = check(str(project), only=["own_tests"]).results
    assert (result.id, result.name) == ("acme-sums", "own_tests")
    return result.outcome.value, result.reason


def test_the_package_is_checked_by_its_own_tests_too(project):
    before = sorted(project.rglob("*"))
    assert own_tests(project) == ("PASS", "2 passed")
    assert sorted(project.rglob("*")) == before, "nothing is written into the project"
    outcome, why = own_tests(project, "def test_it():\n    assert 1 + 1 == 3\n")
    assert (outcome, why) == ("FAIL", "1 failed: tests/test_sums.py::test_it: assert (1 + 1) == 3")
    outcome, why = own_tests(project, "import acme_sum\n")
    assert outcome == "FAIL"
    assert "tests/test_sums.py: " in why
    assert "No module named 'acme_sum'" in why
    outcome, why = own_tests(project, "import os\ndef test_it():\n    os._exit(0)\n")
    assert (outcome, why) == ("FAIL", "its process ended before the job was done")


def test_tests_that_check_do_not_run_themselves(project):
    text = """
        from pathlib import Path
        from rollart_testing.check import check

        def test_it():
            (result,) = check(str(Path.cwd()), only=["own_tests"]).results
            assert result.reason == "the package's own tests are running"
    """
    assert own_tests(project, text) == ("PASS", "1 passed")


def test_no_tests_are_a_skip(project):
    shutil.rmtree(project / "tests")
    assert own_tests(project) == ("SKIP", "the project has no tests")
    (project / "tests").mkdir()
    assert own_tests(project) == ("SKIP", "none of its tests ran")


def wheel_of(project: Path) -> Path:
    """Return a wheel of the project, as a build backend would write it."""
    wheel = project.parent / "acme_sums-0.3-py3-none-any.whl"
    info = "acme_sums-0.3.dist-info"
    metadata = """\
        Metadata-Version: 2.4
        Name: acme-sums
        Version: 0.3
        License-Expression: MIT
        License-File: LICENSE
        Requires-Dist: rollart>=0.1

    """
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted((project / "src").rglob("*.*")):
            archive.write(path, str(path.relative_to(project / "src")))
        archive.writestr(f"{info}/METADATA", textwrap.dedent(metadata))
        archive.writestr(f"{info}/entry_points.txt", "[rollart]\nacme-sums = acme_sums.plugin\n")
        archive.write(project / "LICENSE", f"{info}/licenses/LICENSE")
    return wheel


def test_a_project_and_its_wheel_pass_without_being_installed(project):
    of_folder = check(str(project))
    wheel = wheel_of(project)
    shutil.rmtree(project)
    of_wheel = check(str(wheel))
    for report, without in ((of_folder, set()), (of_wheel, {"own_tests"})):
        assert report.passed, report.results
        assert (report.subject, report.version) == ("acme-sums", "0.3")
        assert report.counts["FAIL"] == 0
        names = [r.name for r in report.results]
        assert names == [*STATIC, *ENVIRONMENT_RUNTIME, *ENVIRONMENT_SEMANTIC, *PACKAGE]
        allowed = {"works_offline"} if not offline.prefix()[0] else set()
        assert {*ended(report.results, CheckOutcome.SKIP)} - allowed == without
    assert json.loads(json.dumps(of_wheel.to_json())) == of_wheel.to_json()
    with pytest.raises(UserError, match="options apply to one plugin"):
        check(str(wheel), options={"size": 3})


def test_there_is_a_broken_one_for_every_check():
    elsewhere = {"fresh_processes_agree", "works_offline"}
    shown = {name for _, name, _ in BROKEN} | {name for name, *_ in FLAWED} | elsewhere
    every = {*STATIC, *(n for names in PARTS["environments"].values() for n in names)}
    assert shown == every
