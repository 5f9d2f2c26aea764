"""Task files validated in boxes: gold is FULL, nothing is NONE, and what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from support.sandbox_types import IN_DOCKER, no_bubblewrap, no_docker
from support.swe_repositories import shapes_task

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import ConfigError, SandboxFailure, UserError
from rollart_core.rollout import loop
from rollart_envs.swe.cli import app
from rollart_envs.swe.taskbook import own_file
from rollart_envs.swe.validate import Verdict, validate
from rollart_sandboxes.pool.source import SandboxSource, sandbox_source

NOT_QUICK = 160
"""A row of HumanEvalPack whose program without its mend runs until its time is over."""


@pytest.fixture
def sandboxes():
    if why := no_bubblewrap():
        pytest.skip(why)
    source = sandbox_source("bubblewrap")
    yield source
    loop.run(source.close())


def verdicts(path: Path, sandboxes: SandboxSource, **settings) -> list[Verdict]:
    heard: list[Verdict] = []
    found = loop.run(validate(path, sandboxes, on_row=heard.append, **settings))
    assert sorted(v.name for v in heard) == sorted(v.name for v in found)
    return found


def test_our_own_repair_tasks_are_sound(sandboxes):
    found = verdicts(own_file("repair_tasks.jsonl"), sandboxes)
    assert [v for v in found if not v.is_sound] == []
    assert len(found) == 5


@pytest.mark.slow
def test_our_own_function_tasks_are_sound(sandboxes):
    found = verdicts(own_file("function_tasks.jsonl"), sandboxes, concurrency=4)
    assert [v for v in found if not v.is_sound] == []
    assert len(found) == 40


def test_what_is_wrong_with_a_row_is_said(sandboxes, tmp_path):
    row = shapes_task(tmp_path / "repos")
    other = row["test_patch"].replace("same(area(2, 3), 6)", "same(area(2, 3), 5)")
    rows = [
        {**row, "instance_id": "good"},
        {**row, "instance_id": "gold fails", "test_patch": other},
        {**row, "instance_id": "passes anyway", "FAIL_TO_PASS": row["PASS_TO_PASS"]},
        {**row, "instance_id": "lost", "base_commit": "0123456789"},
        {**row, "instance_id": "odd", "framework": "nose"},
        {**row, "instance_id": "bad", "patch": ""},
        {**row, "instance_id": "quote", "test_command": "pytest -k 'a"},
        {**row, "instance_id": "half", "files": {"a.py": "\ud800"}},
        {**row, "instance_id": "half a path", "files": {"\ud800.py": "a"}},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + "{\n")
    found = {v.name: v for v in verdicts(path, sandboxes)}
    assert {name: (v.gold, v.empty) for name, v in found.items()} == {
        "good": ("full", "none"),
        "gold fails": ("none", "full"),
        "passes anyway": ("full", "full"),
        "lost": ("error", "error"),
        "odd": ("error", "error"),
        "bad": ("error", "error"),
        "quote": ("error", "error"),
        "half": ("error", "error"),
        "half a path": ("error", "error"),
        "row 10": ("error", "error"),
    }
    assert [name for name, v in found.items() if v.is_sound] == ["good"]
    assert "tests.test_shapes.TestShapes.test_area" in found["gold fails"].why
    assert "pass without the patch" in found["passes anyway"].why
    assert "no commit 0123456789" in found["lost"].why
    assert "use one of pytest" in found["odd"].why
    assert "field 'patch'" in found["bad"].why
    assert "No closing quotation" in found["quote"].why
    assert "no UTF-8" in found["half"].why
    assert "no UTF-8" in found["half a path"].why
    assert "is no JSON" in found["row 10"].why


def test_a_file_that_is_not_there_is_said(sandboxes, tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        verdicts(tmp_path / "none.jsonl", sandboxes)


def test_where_no_sandbox_starts_no_row_is_blamed():
    source = sandbox_source({"id": "docker", "host": "unix:///nowhere/docker.sock"})
    with pytest.raises(SandboxFailure):
        loop.run(validate(own_file("repair_tasks.jsonl"), source))


class Refusing(SandboxSource):
    """Boxes that cannot be had."""

    def __init__(self, error: Exception) -> None:
        super().__init__("bubblewrap")
        self._error = error

    async def take(self, **needs: object) -> Sandbox:
        raise self._error


def test_whatever_a_row_does_is_its_verdict_but_not_a_persons_mistake():
    path = own_file("repair_tasks.jsonl")
    found = verdicts(path, Refusing(ValueError("embedded null byte")))
    assert {(v.gold, v.empty) for v in found} == {("error", "error")}
    assert all("embedded null byte" in v.why for v in found)
    with pytest.raises(ConfigError):
        verdicts(path, Refusing(ConfigError("no such option")))


def test_a_row_that_no_terminal_can_show_is_told_all_the_same(sandboxes, tmp_path, capsys):
    path = tmp_path / "tasks.jsonl"
    bad = {"instance_id": "half \ud800", "repo": "r"}
    path.write_text(own_file("repair_tasks.jsonl").read_text().split("\n")[0] + "\n")
    with path.open("a") as file:
        file.write(json.dumps(bad) + "\n")
    command = typer.main.get_command(app)
    argv = ["validate", str(path), "--sandbox", "bubblewrap"]
    assert command.main(argv, "swe", standalone_mode=False) == 1
    assert r"half \ud800" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_row_of_humanevalpack_is_sound_behind_bubblewrap(sandboxes, shared_dir, tmp_path):
    assert sound_rows_of_humanevalpack(slice(None), sandboxes, shared_dir, tmp_path) == 164


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_of_humanevalpack_are_sound_behind_bubblewrap(sandboxes, shared_dir, tmp_path):
    assert (
        sound_rows_of_humanevalpack(slice(0, NOT_QUICK, 20), sandboxes, shared_dir, tmp_path) == 8
    )


@pytest.mark.docker
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("every", "num_rows"), [(20, 8), pytest.param(4, 40, marks=pytest.mark.nightly)]
)
def test_rows_of_humanevalpack_are_sound_in_containers(every, num_rows, shared_dir, tmp_path):
    if why := no_docker():
        pytest.skip(why)
    source = sandbox_source({"id": "docker", **IN_DOCKER})
    which = slice(0, NOT_QUICK, every)
    assert sound_rows_of_humanevalpack(which, source, shared_dir, tmp_path) == num_rows
    loop.run(source.close())


def sound_rows_of_humanevalpack(
    which: slice, sandboxes: SandboxSource, shared_dir: Path, tmp_path: Path
) -> int:
    """Check that these rows are sound; return how many that are."""
    rows = (shared_dir / "data/swe/humanevalpack_python.jsonl").read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows[which]))
    found = verdicts(path, sandboxes, concurrency=4)
    assert [v for v in found if not v.is_sound] == []
    return len(found)
