"""The shared task files, row by row."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.pace import scaled

from rollart_envs.rows import TaskFileError
from rollart_envs.swe.function_task import FunctionTask
from rollart_envs.swe.logs import framework_of, read_pytest
from rollart_envs.swe.patch import file_changes, steers_the_runner, touched_files
from rollart_envs.swe.reader import read_function_tasks, read_repair_tasks
from rollart_envs.swe.repair_judge import grade
from rollart_sandboxes.judging import function_judge
from rollart_sandboxes.judging.functions import Judgement, read_judgement


@pytest.fixture(scope="module")
def lite(shared_dir):
    return read_repair_tasks(shared_dir / "data/swe/swebench_lite.jsonl", strict=True).tasks


@pytest.fixture(scope="module")
def functions(shared_dir):
    return read_function_tasks(
        shared_dir / "data/swe/humanevalpack_python.jsonl", strict=True
    ).tasks


def is_cut(test: str) -> bool:
    return "::" in test and "[" in test and not test.endswith("]")


def test_every_row_of_swebench_lite_is_a_task(lite):
    assert len(lite) == 299
    assert Counter(framework_of(task.repo) for task in lite) == {
        "unittest": 114,
        "sympy": 77,
        "matplotlib": 23,
        "pytest-options": 12,
        "pytest": 73,
    }
    assert all(task.test_command for task in lite)


def test_gold_patches_keep_off_the_tests_and_the_runner(lite):
    for task in lite:
        gold, tests = touched_files(task.patch), touched_files(task.test_patch)
        assert gold, task.instance_id
        assert tests, task.instance_id
        assert not set(gold) & set(tests), task.instance_id
        assert not [path for path in gold if steers_the_runner(path)], task.instance_id
        for patch in (task.patch, task.test_patch):
            assert "".join(change.text for change in file_changes(patch)) == patch


def test_ids_cut_at_a_space_match_the_whole_ids_of_a_report_and_the_log(lite):
    tasks = [t for t in lite if any(map(is_cut, (*t.fail_to_pass, *t.pass_to_pass)))]
    assert len(tasks) == 26
    for task in tasks:
        ids = (*task.fail_to_pass, *task.pass_to_pass)
        ran = {f"{test} and more]" if is_cut(test) else test: "PASSED" for test in ids}
        expected = {
            "fail_to_pass": task.fail_to_pass,
            "pass_to_pass": task.pass_to_pass,
            "framework": framework_of(task.repo),
        }
        assert grade(ran, **expected).resolution == "full", task.instance_id
        log = "=== short test summary info ===\n" + "".join(f"PASSED {test}\n" for test in ran)
        assert grade(read_pytest(log), **expected).resolution == "full", task.instance_id
        broken = next(test for test in ran if test.endswith(" and more]"))
        sibling = broken.replace(" and more]", " and worse]")
        assert grade({**ran, sibling: "FAILED"}, **expected).resolution != "full"


def test_only_one_row_names_what_is_no_test(lite):
    noisy = {
        task.instance_id: grade(
            {}, fail_to_pass=task.fail_to_pass, pass_to_pass=task.pass_to_pass
        ).left_out
        for task in lite
    }
    assert {name: len(left_out) for name, left_out in noisy.items() if left_out} == {
        "pytest-dev__pytest-5227": 3
    }


def test_parquet_is_read_as_json_lines_are(lite, tmp_path):
    rows = [
        {
            "instance_id": task.instance_id,
            "repo": task.repo,
            "base_commit": task.base_commit,
            "problem_statement": task.problem_statement,
            "patch": task.patch,
            "test_patch": task.test_patch,
            "FAIL_TO_PASS": list(task.fail_to_pass),
            "PASS_TO_PASS": list(task.pass_to_pass),
        }
        for task in lite[:70]
    ]
    rows[3]["base_commit"] = None
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    read = read_repair_tasks(path)
    assert [bad.row for bad in read.bad] == [4]
    assert [task.pass_to_pass for task in read.tasks] == [
        task.pass_to_pass for n, task in enumerate(lite[:70]) if n != 3
    ]
    path.write_bytes(b"PAR1 no")
    with pytest.raises(TaskFileError, match="Parquet"):
        read_repair_tasks(path)


def test_every_function_statement_holds_the_bug_and_no_hidden_test(functions):
    assert len(functions) == 164
    for task in functions:
        assert task.buggy_code.strip() in task.statement()
        assert task.test.strip() in task.secrets(), task.task_id
        assert not any(secret in task.statement() for secret in task.secrets())


def judged(task: FunctionTask, candidate: str, folder: Path, timeout_s: float) -> Judgement:
    done = subprocess.run(
        [sys.executable, "-I", function_judge.__file__],
        input=task.hidden.request(candidate, nonce="n1", timeout_s=timeout_s),
        capture_output=True,
        cwd=folder,
        timeout=scaled(100),
        check=False,
    )
    return read_judgement(done.stdout, "n1")


def disagreements(tasks: list[FunctionTask], folder: Path) -> list[tuple[str, str, str]]:
    """Return (task, which code, reason) where the judge is not of the data's opinion."""
    return [
        (task.task_id, which, judgement.reason)
        for task in tasks
        # Some bugs loop for ever.
        for which, code, timeout_s in (
            ("passed", task.gold_code, 60.0),
            ("failed", task.buggy_code, 1.0),
        )
        if (judgement := judged(task, code, folder, timeout_s)).verdict != which
    ]


def test_gold_passes_and_the_bug_fails_on_rows_with_helpers_and_random_tests(functions, tmp_path):
    chosen = [functions[i] for i in (0, 10, 32, 38, 50)]
    assert disagreements(chosen, tmp_path) == []
