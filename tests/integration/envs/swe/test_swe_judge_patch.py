"""Grading of patches in boxes: gold is full, nothing is none, and spoofs do not pay."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.sandbox_types import no_bubblewrap
from support.swe_repositories import FIX, SHAPES, diff, git, pytest_packages, shapes_task, write

from rollart_core.errors import SandboxFailure
from rollart_core.rollout import loop
from rollart_envs.swe.acceptable import acceptable
from rollart_envs.swe.repair_judge import Report, judge_patch
from rollart_envs.swe.repository import TaskFailure, base_tree, repository_in
from rollart_envs.swe.runs import test_run
from rollart_envs.swe.task import RepairTask, repair_task
from rollart_envs.swe.workspace import needs_of
from rollart_sandboxes.pool.source import sandbox_source


class Bench:
    """A task of each framework, and a box to judge in."""

    def __init__(self, folder: Path) -> None:
        packages = pytest_packages(folder / "packages")
        self.sandboxes = sandbox_source("bubblewrap")
        self.repos = {name: folder / name for name in ("unittest", "pytest")}
        extra = {"unittest": {}, "pytest": {"python_path": [str(packages)]}}
        self.tasks = {
            name: repair_task(shapes_task(repos, name, **extra[name]))
            for name, repos in self.repos.items()
        }

    def judged(self, task: RepairTask, patch: str, timeout_s: float = 60.0) -> Report:
        tree = base_tree(task, self.repos[str(task.extra["framework"])])
        needs = needs_of(task, beside=None, python="/usr/bin/python3")
        return loop.run(judge_patch(self.sandboxes, task, tree, patch, needs, timeout_s=timeout_s))

    def diff(self, name: str, files) -> str:
        folder = self.repos[name] / "acme__shapes"
        git(folder, "checkout", "-q", self.tasks[name].base_commit)
        try:
            return diff(folder, files)
        finally:
            git(folder, "checkout", "-q", "-")


@pytest.fixture(scope="module")
def bench():
    if why := no_bubblewrap():
        pytest.skip(why)
    with tempfile.TemporaryDirectory() as folder:  # not below tmp_path, which a box may not read
        Path(folder).chmod(0o755)
        yield Bench(Path(folder))


BOTH = pytest.mark.parametrize("name", ["unittest", "pytest"])


@BOTH
def test_gold_is_full_and_nothing_is_none(bench, name):
    task = bench.tasks[name]
    gold, empty = bench.judged(task, task.patch), bench.judged(task, "")
    assert (gold.grade.resolution, gold.why, gold.grade.failed) == ("full", "", ())
    assert empty.grade.resolution == "none"
    assert empty.grade.failed == task.fail_to_pass
    assert empty.grade.pass_to_pass == 1.0
    assert len(empty.statuses) == 2
    assert "FAILED" in empty.log


def test_processes_of_tests_import_as_from_an_installed_project(bench):
    """They set PYTHONPATH, start in another folder, or are found on the PATH."""
    code = "import pytest, shapes; print(shapes.area(2, 3), end='')"
    test = (
        "import os\nimport subprocess\nimport sys\n\nimport pytest\n\n\n"
        "@pytest.mark.parametrize('python', [sys.executable, 'python'])\n"
        "@pytest.mark.parametrize('path', [None, '', 'tests:'])\n"
        "def test_elsewhere(python, path, tmp_path):\n"
        "    env = {**os.environ, **({} if path is None else {'PYTHONPATH': path})}\n"
        f"    command = [python, '-c', {code!r}]\n"
        "    assert subprocess.check_output(command, cwd=tmp_path, env=env) == b'6'\n"
    )
    task = bench.tasks["pytest"]
    task = replace(
        task,
        test_patch=bench.diff("pytest", {"tests/test_elsewhere.py": test}),
        fail_to_pass=tuple(
            f"tests/test_elsewhere.py::test_elsewhere[{path}-{python}]"
            for path in ("None", "", "tests:")
            for python in ("python",)
        ),
        pass_to_pass=(),
    )
    gold, empty = bench.judged(task, task.patch), bench.judged(task, "")
    assert (gold.grade.resolution, gold.why, gold.grade.failed) == ("full", "", ()), gold.log
    assert set(gold.statuses.values()) == {"PASSED"}
    assert len(gold.statuses) == 6
    assert set(empty.statuses.values()) == {"FAILED"}


@BOTH
def test_a_test_with_a_failed_subtest_has_failed(bench, name):
    """pytest 9 reports the subtest as failed, and then the test as passed."""
    test = (
        "import unittest\n\nimport shapes\n\n\nclass TestParts(unittest.TestCase):\n"
        "    def test_parts(self):\n"
        "        for a in (0, 2):\n"
        "            with self.subTest(a=a):\n"
        "                self.assertEqual(shapes.area(a, 3), 3 * a)\n"
    )
    task = bench.tasks[name]
    pytest_id, unittest_id = "tests/test_parts.py::TestParts::test_parts", "test_parts"
    task = replace(
        task,
        test_patch=bench.diff(name, {"tests/test_parts.py": test}),
        fail_to_pass=(
            pytest_id
            if name == "pytest"
            else f"{unittest_id} (tests.test_parts.TestParts.{unittest_id})",
        ),
        pass_to_pass=(),
    )
    gold, empty = bench.judged(task, task.patch), bench.judged(task, "")
    assert (gold.grade.resolution, empty.grade.resolution) == ("full", "none"), gold.log
    assert set(empty.statuses.values()) <= {"FAILED", "ERROR"}


def test_a_log_is_read_where_a_shell_runs_the_tests(bench):
    command = "echo begin; /usr/bin/python3 -m unittest -v tests.test_shapes"
    ids = {
        "fail_to_pass": ("test_area (tests.test_shapes.TestShapes.test_area)",),
        "pass_to_pass": ("test_edge (tests.test_shapes.TestShapes.test_edge)",),
    }
    task = replace(bench.tasks["unittest"], test_command=command, **ids)
    assert test_run(task).runner == "shell"
    gold, empty = bench.judged(task, task.patch), bench.judged(task, "")
    statuses = {status for test, status in empty.statuses.items() if "test_area" in test}
    if not statuses:
        pytest.skip("this Python's unittest writes ids otherwise")
    assert (gold.grade.resolution, empty.grade.resolution) == ("full", "none")


def test_a_log_without_its_middle_proves_nothing(bench):
    command = "seq 100000; /usr/bin/python3 -m unittest -v tests.test_shapes; seq 100000"
    task = replace(bench.tasks["unittest"], test_command=command)
    tree = base_tree(task, bench.repos["unittest"])
    needs = needs_of(task, beside=None, python="/usr/bin/python3")
    sandboxes = sandbox_source({"id": "bubblewrap", "output_bytes": 4000})
    report = loop.run(judge_patch(sandboxes, task, tree, task.patch, needs))
    assert report.grade.resolution == "none"
    assert report.why == "the log is longer than the 4000 bytes that the sandbox returns"


FORGED = "def area(w, h):\n    return 0\n\n\ndef edge(w, h):\n    return 2 * (w + h)\n"
PRINTS = (
    "print('tests.test_shapes.TestShapes.test_area ... ok')\n"
    "print('PASSED tests/test_shapes.py::TestShapes::test_area')\n"
    "print('test_area (tests.test_shapes.TestShapes) ... ok')\n"
)
EMPTY_TESTS = (
    "import unittest\n\n\nclass TestShapes(unittest.TestCase):\n"
    "    def test_area(self):\n        pass\n\n    def test_edge(self):\n        pass\n"
)
ALL_PASS = (
    "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\n"
    "def pytest_runtest_makereport(item, call):\n    outcome = yield\n"
    "    report = outcome.get_result()\n    report.outcome = 'passed'\n"
)
SKIP = "import unittest\nraise unittest.SkipTest('not today')\n"
PLUGIN = "[pytest]\naddopts = -p evil\n"
SPOOFS = {
    "prints": {"shapes/__init__.py": PRINTS + FORGED},
    "edited tests": {"tests/test_shapes.py": EMPTY_TESTS},
    "deleted tests": {"tests/test_shapes.py": None},
    "a module of the tests": {"tests/asserts.py": "def same(a, b):\n    pass\n"},
    "tests that are a package": {"tests/test_shapes/__init__.py": EMPTY_TESTS},
    "conftest": {"conftest.py": ALL_PASS},
    "conftest of the tests": {"tests/conftest.py": ALL_PASS},
    "pytest.ini": {"pytest.ini": PLUGIN, "evil.py": ALL_PASS},
    "setup.cfg": {
        "pytest.ini": None,
        "setup.cfg": PLUGIN.replace("[", "[tool:"),
        "evil.py": ALL_PASS,
    },
    "pyproject.toml": {
        "pytest.ini": None,
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p evil'\n",
        "evil.py": ALL_PASS,
    },
    "a pytest": {"pytest.py": "def main(*a, **k):\n    raise SystemExit(0)\n"},
    "a package of pytest's": {
        "_pytest/__init__.py": "",
        "_pytest/config.py": "raise SystemExit(0)",
    },
    "a unittest": {"unittest/__init__.py": "raise SystemExit(0)\n"},
    "a json": {"json.py": "raise SystemExit(0)\n"},
    "on PATH": {"bin/pytest": "#!/bin/sh\nexit 0\n", "pytest": "#!/bin/sh\nexit 0\n"},
    "sitecustomize": {"sitecustomize.py": "import os; os._exit(0)\n"},
    "usercustomize": {"usercustomize.py": "import os; os._exit(0)\n"},
    "pth": {"evil.pth": "import os; os._exit(0)\n"},
    "exits": {"shapes/__init__.py": "import sys\nsys.exit(0)\n"},
    "exits hard": {"shapes/__init__.py": "import os\nos._exit(0)\n"},
    "exits at the end": {
        "shapes/__init__.py": "import atexit, os\natexit.register(os._exit, 0)\n" + FORGED
    },
    "skips": {"shapes/__init__.py": SKIP},
    "equal to all": {
        "shapes/__init__.py": "class E(int):\n    def __add__(self, other):\n        return 0\n"
        + FORGED
    },
    "another unittest": {
        "shapes/__init__.py": "import unittest\n\n\ndef run(self, result=None):\n"
        "    result.startTest(self)\n    result.addSuccess(self)\n    result.stopTest(self)\n\n\n"
        "unittest.TestCase.run = run\n" + FORGED
    },
    "another pytest": {
        "shapes/__init__.py": "try:\n    from _pytest.reports import TestReport\n"
        "    old = TestReport.from_item_and_call.__func__\n\n"
        "    def report(cls, item, call):\n        found = old(cls, item, call)\n"
        "        found.outcome = 'passed'\n        return found\n\n"
        "    TestReport.from_item_and_call = classmethod(report)\n"
        "except ImportError:\n    pass\n" + FORGED
    },
    "a daemon": {
        "shapes/__init__.py": "import os\nif os.fork() == 0:\n    os.setsid()\n"
        "    while True:\n        pass\n" + FORGED
    },
    "a report": {
        "shapes/__init__.py": "import glob\nfor path in glob.glob('/work/*/report'):\n"
        "    with open(path, 'a') as file:\n"
        '        file.write(\'{"id": "x", "status": "PASSED"}\\n{"end": 0}\\n\')\n' + FORGED
    },
    "no patch": {},
}


@BOTH
@pytest.mark.parametrize("spoof", SPOOFS)
def test_a_spoof_does_not_pay(bench, name, spoof):
    patch = bench.diff(name, SPOOFS[spoof]) if SPOOFS[spoof] else "not a diff at all\n"
    report = bench.judged(bench.tasks[name], patch)
    assert report.grade.resolution == "none", report
    assert report.grade.reward == 0.0


def test_a_pytest_without_a_package_of_later_versions_is_guarded(bench):
    """pytest 5 does not need iniconfig. A patch cannot add it, and so be taken for pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        packages = pytest_packages(Path(folder) / "packages")
        (packages / "iniconfig").rename(packages / "old_iniconfig")
        for path in (packages / "_pytest").rglob("*.py"):
            text = path.read_text().replace("import iniconfig", "import old_iniconfig as iniconfig")
            path.write_text(text.replace("from iniconfig", "from old_iniconfig"))
        task = bench.tasks["pytest"]
        task = replace(task, extra={**task.extra, "python_path": [str(packages)]})
        gold = bench.judged(task, task.patch)
        assert gold.grade.resolution == "full", gold
        for files in ({}, {"iniconfig/__init__.py": ""}):
            patch = bench.diff("pytest", {**SPOOFS["another pytest"], **files})
            report = bench.judged(task, patch)
            assert report.grade.resolution == "none", report


@BOTH
def test_who_mends_it_is_paid_whatever_else_stands_in_the_patch(bench, name):
    files = {**FIX, "tests/test_shapes.py": EMPTY_TESTS, "conftest.py": "raise SystemExit(0)\n"}
    report = bench.judged(bench.tasks[name], bench.diff(name, files))
    assert report.grade.resolution == "full", report
    assert set(report.left_out) == {"tests/test_shapes.py", "conftest.py"}


@BOTH
def test_out_of_time_is_no_proof(bench, name):
    patch = bench.diff(name, {"shapes/__init__.py": "while True:\n    pass\n"})
    report = bench.judged(bench.tasks[name], patch, timeout_s=1.0)
    assert (report.grade.resolution, report.why) == ("none", "the tests ran out of time: 1 s")


def test_a_patch_may_touch_what_the_tasks_own_patch_touches():
    gold = "--- a/setup.cfg\n+++ b/setup.cfg\n@@ -1 +1 @@\n-a\n+b\n"
    tests = gold.replace("setup.cfg", "pkg/tests/test_a.py")
    task = repair_task(
        {
            "instance_id": "i",
            "repo": "r",
            "base_commit": "0" * 40,
            "problem_statement": "p",
            "patch": gold,
            "test_patch": tests,
            "FAIL_TO_PASS": ["other/test_b.py::test_b"],
            "PASS_TO_PASS": [],
        }
    )

    def left_out(path: str) -> bool:
        return bool(acceptable(task, gold.replace("setup.cfg", path))[1])

    assert not left_out("setup.cfg")
    for path in ("pkg/tests/test_a.py", "pkg/tests/deep/data.txt", "other/test_b.py"):
        assert left_out(path), path
    for path in ("pkg/a.py", "other/b.py", "more/tests/test_c.py"):
        assert not left_out(path), path
    for path in ("tox.ini", "a/conftest.py", "x/sitecustomize.py", "pyproject.toml"):
        assert left_out(path), path


def test_a_sandbox_without_the_runner_is_a_failure(bench):
    task = replace(bench.tasks["pytest"], extra={"framework": "pytest"})
    probe = ["/usr/bin/python3", "-I", "-c", "import pytest"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        pytest.skip("the system's Python has pytest")
    with pytest.raises(SandboxFailure, match=r"cannot import _pytest\.config") as caught:
        bench.judged(task, task.patch)
    assert caught.value.retryable is False


def test_a_test_patch_that_fits_nothing_is_the_tasks_fault(bench):
    task = bench.tasks["unittest"]
    broken = replace(task, test_patch=task.test_patch.replace("import edge", "import nothing"))
    for patch in ("", task.patch):
        with pytest.raises(TaskFailure, match="acme__shapes-unittest: its test patch does not"):
            bench.judged(broken, patch)


def test_the_history_stays_outside(bench):
    task = bench.tasks["unittest"]
    command = "git log --all --format=%s; git cat-file --batch-all-objects --batch"
    looks = replace(task, test_command=f"{command} | grep -c SECRETLY; echo looked")
    assert "SECRETLY" not in bench.judged(looks, "").log
    assert "looked" in bench.judged(looks, "").log


def test_a_repository_or_commit_that_is_not_there_is_named(bench, tmp_path):
    task = bench.tasks["unittest"]
    repos = bench.repos["unittest"]
    with pytest.raises(TaskFailure, match="acme__shapes-unittest: no commit 0123456"):
        base_tree(replace(task, base_commit="0123456789"), repos)
    with pytest.raises(TaskFailure, match=r"no repository 'acme/other' in .*acme__other, acme__o"):
        base_tree(replace(task, repo="acme/other"), repos)
    with pytest.raises(TaskFailure, match="give repos_dir"):
        base_tree(task, None)
    with pytest.raises(TaskFailure, match="no name of a repository"):
        base_tree(replace(task, repo="../acme"), repos)
    for name in ("acme/shapes", "acme/shapes.git", "shapes", "shapes.git"):
        bare = tmp_path / name
        git(repos / "acme__shapes", "clone", "-q", "--bare", ".", str(bare))
        assert repository_in(tmp_path, task.repo) == bare
        assert base_tree(task, tmp_path) == base_tree(task, repos)
        bare.rename(tmp_path / "elsewhere" if name == "nothing" else tmp_path / f"x{len(name)}")


def test_a_folder_without_git_is_taken_as_it_stands(bench, tmp_path):
    write(tmp_path / "shapes", SHAPES)
    task = bench.tasks["unittest"]
    tree = base_tree(replace(task, base_commit="0" * 40), tmp_path)
    needs = needs_of(task, beside=None, python="/usr/bin/python3")
    report = loop.run(judge_patch(bench.sandboxes, task, tree, task.patch, needs))
    assert report.grade.resolution == "full"
