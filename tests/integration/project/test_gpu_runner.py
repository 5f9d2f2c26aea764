"""`make test-gpu`: the cases of the trainer on the CPU, and what the runner does with each end."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
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


@pytest.mark.parametrize(("part", "skipped"), [("trainer", ["out_of_memory"]), ("multi", [])])
def test_all_cases_of_a_part_pass_on_the_cpu(
    part: str, skipped: list[str], repo_root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "results.json"
    python = f"PYTHON={sys.executable}"
    ended = make(repo_root, python, f"PART={part}", "DEVICE=cpu", f"JSON={path}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(path.read_text())
    assert [case["case"] for case in results["cases"]] == [*cases_of(repo_root, part)]
    passed = [case for case in results["cases"] if case["case"] not in skipped]
    assert {case["result"] for case in passed} == {"passed"}, ended.stdout
    assert all(case["figures"] for case in passed)
    assert len(passed) == len(results["cases"]) - len(skipped)
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
    }, output
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
        [sys.executable, "-c", f"import sys; {blocked}import {part}"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(repo_root / f) for f in folders)},
    )
    assert ended.returncode == 0, ended.stderr


def cases_of(repo_root: Path, part: str) -> dict[str, int]:
    """Return the cases of a part, and their time limits in seconds."""
    text = (repo_root / f"tests/gpu/{part}_part.py").read_text()
    listed = text[text.index("\nCASES: ") :]
    return {name: int(limit) for name, limit in re.findall(r"^    (\w+): (\d+),$", listed, re.M)}


def test_the_table_of_what_was_verified_has_every_case(repo_root: Path) -> None:
    rows = yaml.safe_load((repo_root / "tests/gpu/verified.yaml").read_text())
    listed = [name for row in rows for name in row.get("cases", {})]
    cases = [
        f"{part}/{n}" for part in ("trainer", "engine", "multi") for n in cases_of(repo_root, part)
    ]
    assert sorted(set(listed)) == sorted(cases)


def test_the_table_shows_results_by_device_and_date(repo_root: Path) -> None:
    tables = runpy.run_path(str(repo_root / "docs/tables.py"))
    figures = [{"name": "save", "value": 2.0, "unit": "GB/s"}, {"name": "other", "value": 1}]
    case = {"part": "trainer", "case": "a", "date": "2026-12-01T10:00:00+00:00"}
    results = {
        ("CPU", "trainer/a"): {**case, "result": "passed", "figures": figures},
        ("CPU", "trainer/b"): {**case, "case": "b", "result": "failed"},
        ("H100", "trainer/a"): {**case, "result": "passed", "figures": figures},
        ("H100", "trainer/b"): {**case, "case": "b", "result": "failed"},
    }
    row = {"what": "this", "cpu": {"make test": "2026-11-30"}, "never": "that"}
    shown = tables["_verified_row"]({**row, "cases": {"trainer/a": ["save"]}}, results)
    assert [*shown] == [
        "this",
        "`make test`, 2026-11-30<br>`make test-gpu PART=trainer DEVICE=cpu`, 2026-12-01",
        "passed, H100, 2026-12-01: save 2 GB/s",
        "that",
    ]
    shown = tables["_verified_row"]({"what": "this", "cases": {"trainer/b": []}}, results)
    assert [*shown][1:3] == ["never run", "failed, H100, 2026-12-01"]


def test_the_newest_result_of_a_case_counts(repo_root: Path, tmp_path: Path) -> None:
    tables = runpy.run_path(str(repo_root / "docs/tables.py"))
    for name, day, result in (("x", 2, "failed"), ("y", 1, "passed"), ("z", 3, "skipped")):
        case = {"part": "multi", "case": "a", "date": f"2026-12-0{day}", "result": result}
        (tmp_path / "results").mkdir(exist_ok=True)
        text = json.dumps({"device": "H100", "cases": [case]})
        (tmp_path / f"results/{name}.json").write_text(text)
    tables["gpu_results"].__globals__["GPU_TESTS"] = tmp_path
    found = tables["gpu_results"]()
    assert {key: case["result"] for key, case in found.items()} == {("H100", "multi/a"): "failed"}
