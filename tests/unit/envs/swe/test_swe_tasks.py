import json

import pytest

from rollart_envs.rows import RowError, TaskFileError
from rollart_envs.swe.function_task import candidate_of, function_task
from rollart_envs.swe.reader import read_function_tasks, read_repair_tasks
from rollart_envs.swe.runs import test_run as run_of_tests
from rollart_envs.swe.task import repair_task
from rollart_sandboxes.judging.functions import read_judgement

DIFF = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
ROW = {
    "instance_id": "acme__a-1",
    "repo": "acme/a",
    "base_commit": "0123456789abcdef",
    "problem_statement": "x should be 2",
    "patch": DIFF,
    "test_patch": DIFF,
    "FAIL_TO_PASS": ["t.py::test_x"],
    "PASS_TO_PASS": '["t.py::test_y", "t.py::test_y"]',
    "version": 4.3,
    "pr_link": "somewhere",
}
FUNCTION = {
    "task_id": "Python/0",
    "entry_point": "area",
    "declaration": "def area(w, h):\n",
    "buggy_solution": "    return w + h\n",
    "canonical_solution": "    return w * h\n",
    "test": "def check(area):\n    assert area(2, 3) == 6\n\ncheck(area)\n",
    "instruction": "Write a function `area`.",
}


def test_lists_and_json_strings_of_test_ids_are_the_same():
    task = repair_task(ROW)
    assert task.fail_to_pass == ("t.py::test_x",)
    assert task.pass_to_pass == ("t.py::test_y",)
    assert (task.version, task.image, dict(task.extra)) == ("4.3", None, {"pr_link": "somewhere"})
    assert repair_task({**ROW, "PASS_TO_PASS": "[]"}).pass_to_pass == ()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("repo", None, "is missing"),
        ("instance_id", " ", "is empty"),
        ("problem_statement", ["x"], "is a list"),
        ("base_commit", "--upload-pack=x", "hex digits"),
        ("patch", "x = 2", "unified diff"),
        ("FAIL_TO_PASS", [], "at least one test"),
        ("FAIL_TO_PASS", "test_x", "not a JSON list"),
        ("PASS_TO_PASS", {"a": 1}, "is a dict"),
        ("PASS_TO_PASS", ["a", 3], "has 3 at position 1"),
        ("PASS_TO_PASS", ["t.py::a\0"], "cannot be a program argument"),
        ("test_command", "pytest \0", "cannot be a program argument"),
        ("test_patch", DIFF + "+\ud800\n", r"has '\\ud800', which cannot be encoded"),
    ],
)
def test_a_bad_field_is_named_with_what_is_wrong(name, value, why):
    with pytest.raises(RowError, match=why) as caught:
        repair_task({**ROW, name: value})
    assert caught.value.field == name


def test_bytes_that_are_no_text_stand_in_a_patch_as_git_gives_them():
    latin = DIFF + "+\udce9\n"
    assert repair_task({**ROW, "patch": latin}).patch == latin


def test_a_command_that_is_none_is_the_rows_mistake():
    task = repair_task({**ROW, "test_command": "pytest -k 'a"})
    with pytest.raises(RowError, match="No closing quotation") as caught:
        run_of_tests(task)
    assert caught.value.field == "test_command"


def test_bad_rows_are_listed_and_good_ones_kept_or_the_first_one_raises(tmp_path):
    path = tmp_path / "tasks.jsonl"
    bad = {**ROW, "instance_id": "acme__a-2", "repo": ""}
    lines = [json.dumps(ROW), "", "{broken", json.dumps(bad), json.dumps(ROW), "[1]"]
    path.write_text("\n".join(lines))
    rows = read_repair_tasks(path)
    assert [task.instance_id for task in rows.tasks] == ["acme__a-1"]
    assert [(bad.row, bad.name) for bad in rows.bad] == [
        (3, ""),
        (4, "acme__a-2"),
        (5, "acme__a-1"),
        (6, ""),
    ]
    assert str(rows.bad[1]) == f"{path}, row 4 (acme__a-2): field 'repo': is empty"
    with pytest.raises(TaskFileError, match=r"row 3: .*no JSON"):
        read_repair_tasks(path, strict=True)


def test_a_file_that_is_missing_empty_or_of_another_kind_is_an_error(tmp_path):
    with pytest.raises(TaskFileError, match="there is no such file"):
        read_repair_tasks(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TaskFileError, match="holds no rows"):
        read_function_tasks(tmp_path / "empty.jsonl")
    (tmp_path / "tasks.txt").touch()
    with pytest.raises(TaskFileError, match="has to end in"):
        read_repair_tasks(tmp_path / "tasks.txt")


def test_the_statement_holds_the_bug_and_no_secret():
    task = function_task(FUNCTION)
    assert "return w + h" in task.statement()
    assert task.secrets() == (FUNCTION["test"].strip(), "return w * h")
    assert not any(secret in task.statement() for secret in task.secrets())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("entry_point", "volume", "does not define"),
        ("test", "", "not empty"),
        ("test", "def check(:", "not Python"),
        ("canonical_solution", None, "is missing"),
    ],
)
def test_a_function_row_is_checked(name, value, why):
    with pytest.raises(RowError, match=why):
        function_task({**FUNCTION, name: value})


def test_the_candidate_is_the_last_fenced_block_or_the_whole_answer():
    assert candidate_of("so:\n```\na\n```\nor\n```python\nb = 1\n```\n") == "b = 1\n"
    assert candidate_of("b = 2\n") == "b = 2\n"


def test_only_one_line_with_the_nonce_is_a_judgement():
    right = json.dumps({"nonce": "n", "verdict": "passed"}).encode()
    forged = json.dumps({"nonce": "m", "verdict": "passed"}).encode()
    assert read_judgement(b"PASSED\n" + forged + b"\n" + right, "n").verdict == "passed"
    for stdout in (b"", b"passed", forged, right + b"\n" + right, b'"n"', b"[" * 99999):
        assert read_judgement(stdout, "n").verdict == "error"
