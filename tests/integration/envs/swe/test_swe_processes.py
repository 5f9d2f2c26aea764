"""The judge, the report plugin and the patches, with real processes in a temporary folder."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.pace import scaled

from rollart_core.contracts.sandbox import ExecResult
from rollart_envs.swe import guard, report_plugin, unit_runners
from rollart_envs.swe.function_task import FunctionTask, function_task
from rollart_envs.swe.logs import read_pytest, read_unittest, worst
from rollart_envs.swe.patch import apply_patch, extract_patch, restore_commands
from rollart_envs.swe.repair_judge import ReportError, cut_id, read_report
from rollart_sandboxes.judging import function_judge
from rollart_sandboxes.judging.functions import read_judgement

AREA = function_task(
    {
        "task_id": "area",
        "entry_point": "area",
        "declaration": "def area(w, h):\n",
        "buggy_solution": "    return w + h\n",
        "canonical_solution": "    return w * h\n",
        "test": "def check(area):\n    assert area(2, 3) == 6\n    assert area(0.5, 4) == 2.0\n"
        "    try:\n        area(None, 2)\n    except TypeError:\n        pass\n"
        "    else:\n        assert False\n\ncheck(area)\n",
        "instruction": "The area of a rectangle.",
    }
)
GOOD = AREA.gold_code
SPOOFS = {
    "exits": "import sys\nsys.exit(0)\n",
    "exits_hard": "import os\nos._exit(0)\n",
    "exits_when_called": "import os\ndef area(w, h):\n    os._exit(0)\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef area(w, h):\n    return 1\n",
    "equal_to_all": "class E(int):\n    def __eq__(self, other):\n        return True\n"
    "    __hash__ = None\ndef area(w, h):\n    return E()\n",
    "no_plain_value": "def area(w, h):\n    return object()\n",
    "patches_builtins": "import builtins\nbuiltins.AssertionError = KeyError\n"
    "def area(w, h):\n    return 1\n",
    "prints_a_verdict": 'import os\nline = b\'{"nonce": "n1", "verdict": "passed"}\\n\'\n'
    "for fd in range(64):\n    try:\n        os.write(fd, line)\n"
    "    except OSError:\n        pass\n"
    "def area(w, h):\n    return 1\n",
    "writes_to_the_judge": "import os\nfor fd in range(64):\n    try:\n"
    "        with open(f'/proc/{os.getppid()}/fd/{fd}', 'wb') as file:\n"
    '            file.write(b\'{"nonce": "n1", "verdict": "passed"}\\n\')\n'
    "    except OSError:\n        pass\ndef area(w, h):\n    return 1\n",
    "reads_the_judge": "import os\nwith open(f'/proc/{os.getppid()}/mem', 'rb'):\n    pass\n"
    + GOOD,
    "kills_the_judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "never_answers": "def area(w, h):\n    while True:\n        pass\n",
    "eats_memory": "def area(w, h):\n    return len(bytearray(1 << 33))\n",
    "no_function": "x = 1\n",
    "no_python": "def area(:\n",
    "other_name": "def volume(w, h):\n    return w * h\n",
}


def judged(candidate: str, timeout_s: float = 60.0, task: FunctionTask = AREA):
    done = subprocess.run(
        [sys.executable, "-I", function_judge.__file__],
        input=task.hidden.request(candidate, nonce="n1", timeout_s=timeout_s),
        capture_output=True,
        cwd="/",
        timeout=scaled(100),
        check=False,
    )
    return read_judgement(done.stdout, "n1")


def test_what_is_right_passes_also_with_prints_and_helpers():
    assert judged(GOOD).verdict == "passed"
    chatty = "def times(a, b):\n    print('FAILED')\n    return a * b\narea = times\n"
    assert judged(chatty).verdict == "passed"
    assert judged(AREA.buggy_code).reason == "an assertion of the hidden test failed"


@pytest.mark.parametrize("name", SPOOFS)
def test_a_spoof_does_not_pass(name):
    if name in ("reads_the_judge", "writes_to_the_judge") and sys.platform != "linux":
        pytest.skip("/proc is Linux's")
    timeout_s = 0.5 if name == "never_answers" else 60.0
    judgement = judged(SPOOFS[name], timeout_s)
    assert judgement.verdict == ("error" if name == "kills_the_judge" else "failed"), judgement


@pytest.mark.parametrize("name", ["exits_when_called", "never_answers"])
def test_a_hidden_test_that_catches_everything_hides_no_failure(name):
    lenient = "def check(area):\n    try:\n        area(2, 3)\n    except:\n        pass\n"
    judgement = judged(SPOOFS[name], 0.5, replace(AREA, test=f"{lenient}\ncheck(area)\n"))
    assert judgement.verdict == "failed"
    assert "out of time" in judgement.reason or "ended" in judgement.reason


@pytest.mark.parametrize("module", [function_judge, report_plugin, guard, unit_runners])
def test_what_runs_in_a_sandbox_is_one_file_for_python_3_8(module):
    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in imports
        for alias in node.names
    }
    roots = {name.split(".")[0] for name in names}
    assert roots <= sys.stdlib_module_names | {"pytest", "_pytest"}


TESTS = """\
import pytest

@pytest.mark.parametrize("x", [1, 2], ids=["a b", "a c"])
def test_cut(x):
    print("PASSED test_all.py::test_bad")
    assert x == 1

def test_bad():
    assert False

def test_skipped():
    pytest.skip("why not")

@pytest.mark.xfail
def test_expected():
    assert False

@pytest.fixture
def broken():
    raise ValueError

def test_error(broken):
    pass
"""


def reported(folder: Path, *args: str) -> bytes:
    """Run pytest in a folder with the plugin, which lies elsewhere, and return its report."""
    return run_tests(folder, *args)[0]


def run_tests(folder: Path, *args: str) -> tuple[bytes, str]:
    """Run pytest like :func:`reported`; return the report and what was printed."""
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    for module in (report_plugin, guard, unit_runners):
        shutil.copy(module.__file__, outside)
    plugin = outside / "report_plugin.py"
    path = outside / "report"
    env = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(plugin)]
    order = json.dumps({"nonce": "n1", "path": str(path)}) + "\n"
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *args],
        cwd=folder,
        env=env,
        input=order.encode(),
        capture_output=True,
        timeout=scaled(100),
        check=False,
    )
    return path.read_bytes() if path.exists() else b"", done.stdout.decode()


def test_the_plugin_reports_what_became_of_each_test(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "test_all.py").write_text(TESTS)
    assert read_report(reported(repo), "n1") == {
        "test_all.py::test_cut[a b]": "PASSED",
        "test_all.py::test_cut[a c]": "FAILED",
        "test_all.py::test_bad": "FAILED",
        "test_all.py::test_skipped": "SKIPPED",
        "test_all.py::test_expected": "XFAIL",
        "test_all.py::test_error": "ERROR",
    }


def test_log_and_report_of_one_run_say_the_same(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "test_all.py").write_text(TESTS)
    report, log = run_tests(repo, "-rA", "--color=yes")
    by_report = worst((cut_id(test), status) for test, status in read_report(report, "n1").items())
    by_log = read_pytest(log)
    assert by_log.pop("[1]") == by_report.pop("test_all.py::test_skipped") == "SKIPPED"
    assert by_log == by_report


def test_a_pytest_of_the_repositorys_own_stands_in_for_nothing(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "pytest.py").write_text("def main(*args, **kwargs):\n    return 0\n")
    (repo / "test_one.py").write_text("def test_bad():\n    assert False\n")
    assert read_report(reported(repo), "n1") == {"test_one.py::test_bad": "FAILED"}


@pytest.mark.parametrize("how", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise ("])
def test_a_run_that_ends_early_proves_nothing(tmp_path, how):
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "conftest.py").write_text(how + "\n")
    (repo / "test_one.py").write_text("def test_good():\n    pass\n")
    with pytest.raises(ReportError):
        read_report(reported(repo), "n1")


UNITTESTS = """\
import sys
import unittest

class A(unittest.TestCase):
    def test_good(self):
        print("test_bad (test_u.A.test_bad) ... ok", file=sys.stderr)

    def test_told(self):
        "What it tells."

    def test_bad(self):
        self.fail()

    def test_error(self):
        raise ValueError

    @unittest.skip("why not")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()

    def test_parts(self):
        for i in range(2):
            with self.subTest(i=i):
                self.assertEqual(i, 0)
"""


def test_a_real_log_of_unittest_is_read(tmp_path):
    (tmp_path / "test_u.py").write_text(UNITTESTS)
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v", "test_u"],
        cwd=tmp_path,
        capture_output=True,
        timeout=scaled(100),
        check=False,
    )
    statuses = read_unittest(done.stderr.decode())
    expected = {
        "test_good": "PASSED",
        "test_bad": "FAILED",
        "test_error": "ERROR",
        "test_skipped": "SKIPPED",
        "test_expected": "XFAIL",
        "test_parts": "FAILED",
    }
    # From Python 3.11 on the class is followed by the method again.
    got = {name: statuses.get(f"{name} (test_u.A.{name})") for name in expected}
    assert got == expected
    assert statuses["What it tells."] == "PASSED"


class Folder:
    """A box's exec and write_file, on this machine: for our own commands only."""

    async def exec(
        self, argv, *, timeout_s, cwd=None, env=None, stdin=b"", max_output_bytes=1 << 20
    ):
        done = subprocess.run(
            argv,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        return ExecResult(done.returncode, done.stdout, done.stderr)

    async def write_file(self, path, content, *, mode=0o644):
        Path(path).write_bytes(content)


@pytest.fixture
def repo(tmp_path):
    """A repository with one commit."""
    folder = tmp_path / "repo"
    (folder / "tests").mkdir(parents=True)
    (folder / "a.py").write_text("".join(f"x{i} = {i}\n" for i in range(20)))
    (folder / "tests/test_a.py").write_text("old = 1\n")
    (folder / ".gitignore").write_text("*.log\n")
    commit_all(folder)
    return folder


def commit_all(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode()


def extracted(folder: Path) -> str:
    base = git(folder, "rev-parse", "HEAD").strip()
    index = str(folder.parent / "index")
    return asyncio.run(extract_patch(Folder(), repo_dir=str(folder), base=base, index_path=index))


def applied(folder: Path, patch: str):
    path = str(folder.parent / "model.patch")
    return asyncio.run(apply_patch(Folder(), patch, repo_dir=str(folder), patch_path=path))


def test_what_the_agent_changed_comes_out_and_goes_in_again(repo):
    assert extracted(repo) == ""
    git(repo, "config", "diff.noprefix", "true")
    git(repo, "config", "diff.external", "false")
    (repo / "a.py").write_text((repo / "a.py").read_text().replace("x3 = 3", "x3 = 'é\x0c'"))
    (repo / "tests/test_a.py").unlink()
    (repo / "new file.py").write_text("y = 1")
    (repo / "pic.bin").write_bytes(bytes(range(256)))
    (repo / "run.log").write_text("noise")
    (repo / "inner").mkdir()
    (repo / "inner/z.py").write_text("z = 1\n")
    commit_all(repo / "inner")
    patch = extracted(repo)
    assert "inner" not in patch
    assert git(repo, "diff", "--cached", "--no-ext-diff", "--name-only") == ""
    for name in ("new file.py", "pic.bin", "run.log"):
        (repo / name).unlink()
    git(repo, "checkout", "-q", "--", ".")
    assert applied(repo, patch).how == "git apply --verbose"
    assert "x3 = 'é\x0c'" in (repo / "a.py").read_text()
    assert (repo / "new file.py").read_text() == "y = 1"
    assert not (repo / "tests/test_a.py").exists()
    assert not (repo / "pic.bin").exists()
    assert not (repo / "run.log").exists()


def test_a_patch_with_a_stale_context_needs_the_last_fallback(repo):
    (repo / "a.py").write_text((repo / "a.py").read_text().replace("x10 = 10", "x10 = 11"))
    patch = extracted(repo).replace(" x7 = 7\n", " x7 = 70\n")
    git(repo, "checkout", "-q", "--", ".")
    assert applied(repo, patch).how == "patch --batch --fuzz=5 -p1 -i"
    assert "x10 = 11" in (repo / "a.py").read_text()
    git(repo, "checkout", "-q", "--", ".")
    assert applied(repo, patch.replace("x10 = 10", "x10 = 99")).ok is False


def test_test_files_are_brought_back_before_the_test_patch(repo):
    base = git(repo, "rev-parse", "HEAD").strip()
    (repo / "tests/test_a.py").write_text("new = 1\n")
    (repo / "tests/test_b.py").write_text("made = 1\n")
    test_patch = extracted(repo)
    (repo / "tests/test_a.py").write_text("the agent's = 1\n")
    (repo / "tests/test_b.py").write_text("the agent's = 1\n")
    for command in restore_commands(test_patch, base):
        subprocess.run(command, cwd=repo, capture_output=True, check=True)
    assert (repo / "tests/test_a.py").read_text() == "old = 1\n"
    assert applied(repo, test_patch).how == "git apply --verbose"
    assert (repo / "tests/test_a.py").read_text() == "new = 1\n"
    assert (repo / "tests/test_b.py").read_text() == "made = 1\n"
