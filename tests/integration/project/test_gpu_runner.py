"""`make test-gpu`: the cases of the trainer on the CPU, and what the runner does with each end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import wait_gone

RUN = """
import sys
sys.path[:0] = {paths}
import runner
part = runner.Part({module!r}, {needs!r})
sys.exit(runner.run({{"some": part}}, "cpu", runner.Path({path!r}), {limit_s}))
"""
NOT_OF_TORCH = ("cookiecutter", "gymnasium", "jsonschema", "pluggy", "pyarrow", "pydantic")
"""Requirements of RollArt that neither torch nor transformers have."""


def make(repo_root: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "test-gpu", *variables],
        check=False,
        capture_output=True,
        text=True,
        cwd=repo_root,
    )


def run_cases(
    repo_root: Path, folder: Path, *, needs: tuple[str, ...] = (), limit_s: float = 240
) -> tuple[int, str, dict[str, Any]]:
    paths = [str(repo_root / "tests"), str(repo_root / "tests/gpu")]
    path = str(folder / "results.json")
    module = "support.gpu_cases"
    program = RUN.format(paths=paths, module=module, needs=needs, path=path, limit_s=limit_s)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    return ended.returncode, ended.stdout + ended.stderr, json.loads(Path(path).read_text())


def test_all_cases_of_the_trainer_pass_on_the_cpu(repo_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    ended = make(
        repo_root, f"PYTHON={sys.executable}", "PART=trainer", "DEVICE=cpu", f"JSON={path}"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(path.read_text())
    assert {case["result"] for case in results["cases"]} == {"passed"}, ended.stdout
    assert len(results["cases"]) > 7
    assert all(case["figures"] for case in results["cases"])
    assert results["device"] == "CPU"
    assert results["torch"]


def test_without_a_gpu_nothing_passes(repo_root: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    path = tmp_path / "results.json"
    ended = make(repo_root, f"PYTHON={sys.executable}", "PART=trainer", f"JSON={path}")
    assert ended.returncode != 0
    (case,) = json.loads(path.read_text())["cases"]
    assert case["result"] == "skipped"
    assert "finds no CUDA device" in case["reason"]
    assert "0 passed, 0 failed, 1 skipped" in ended.stdout


def test_each_case_has_a_result_however_it_ends(repo_root: Path, tmp_path: Path) -> None:
    code, output, results = run_cases(repo_root, tmp_path)
    found = {case["case"]: case for case in results["cases"]}
    assert code == 1, output
    assert {name: case["result"] for name, case in found.items()} == {
        "passes": "passed",
        "crashes": "failed",
        "misses_its_mark": "failed",
        "raises": "failed",
        "hangs": "failed",
        "lacks_a_package": "skipped",
        "skips": "skipped",
        "ranks": "passed",
        "lost_rank": "failed",
    }
    assert found["passes"]["figures"] == [
        {"name": "speed", "value": 2.0, "unit": "GB/s", "at_least": 1.0},
        {"name": "kernel", "value": "flash"},
    ]
    assert found["crashes"]["reason"] == "its process ended with signal SIGSEGV"
    assert found["crashes"]["figures"] == [{"name": "before the crash", "value": 1}]
    assert "difference: 2 (at most 1); not a number: nan" in found["misses_its_mark"]["reason"]
    assert found["raises"]["reason"] == "ValueError: wrong"
    assert "what it wrote" in found["raises"]["log"]
    assert found["lacks_a_package"]["reason"] == "this Python has no no_such_package"
    assert found["skips"]["reason"] == "one GPU is too few"
    assert "rank 0: it ended with exit code 3" in found["lost_rank"]["reason"]
    assert "2 passed, 5 failed, 2 skipped" in output
    assert found["hangs"]["reason"] == "it did not end within 5 s"
    wait_gone(found["hangs"]["figures"][0]["value"])


def test_a_case_that_is_not_started_in_time_is_skipped(repo_root: Path, tmp_path: Path) -> None:
    code, _, results = run_cases(repo_root, tmp_path, limit_s=0)
    assert code == 77
    assert {case["result"] for case in results["cases"]} == {"skipped"}
    assert {case["reason"] for case in results["cases"]} == {
        "not started: the time limit of the part is over"
    }


def test_a_part_without_its_packages_is_skipped(repo_root: Path, tmp_path: Path) -> None:
    code, _, results = run_cases(repo_root, tmp_path, needs=("torch", "no_such_package"))
    assert code == 77
    (case,) = results["cases"]
    assert case["reason"] == "this Python has no no_such_package"


@pytest.mark.parametrize("part", ["trainer_part", "multi_part"])
def test_the_cases_need_only_torch_and_transformers(repo_root: Path, part: str) -> None:
    folders = [".", "plugins", "tests/gpu"]
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in NOT_OF_TORCH)
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; {blocked}; import {part}"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(repo_root / f) for f in folders)},
    )
    assert ended.returncode == 0, ended.stderr


def test_limits_of_cases_leave_the_part_in_its_eight_minutes(repo_root: Path) -> None:
    """Each case may take its limit only if the sum stays near the limit of the part."""
    for part in ("trainer_part", "engine_part", "multi_part"):
        text = (repo_root / f"tests/gpu/{part}.py").read_text()
        limits = [int(n) for n in re.findall(r"^    \w+: (\d+),$", text, flags=re.MULTILINE)]
        assert limits
        assert max(limits) <= 240
