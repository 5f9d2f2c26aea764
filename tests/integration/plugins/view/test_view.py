"""`rollart plot` and `rollart export`, on journals as runs write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollart_core.cli import main
from rollart_core.errors import UserError
from rollart_core.store.journal import Journal
from rollart_core.store.trajectory_files import read_shard
from rollart_core.types import Failure, FailureKind, Sample, Task, Ticket, Trajectory, Turn
from rollart_view.export import Filters, export
from rollart_view.pictures import save
from rollart_view.plot import plot, read_course, throughput

CONFIG = {"mode": "async", "max_staleness": 1, "name": "test"}
Command = Callable[..., tuple[int, str, str]]


def trajectory(number: int, *, reward: float | None, env: str = "toy/A-v1") -> Trajectory:
    group = f"g{number:07d}"
    ticket = Ticket(f"{group}.0", Task(env, "train", number, 7), group, 0)
    failure = None if reward is not None else Failure(FailureKind.TIMEOUT, "env.step", "late")
    turns = tuple(Turn(f"page {i}", f"é {i}", 5, 2, "stop", 0.5, 0.1, 0.1) for i in range(2))
    mask = np.array([False, True, True])
    sample = Sample(
        np.array([1, 2, 3], np.int32),
        mask,
        np.array([0, -1, -2], np.float32),
        np.where(mask, 4, -1).astype(np.int32),
        np.where(mask, 0, -1).astype(np.int32),
    )
    return Trajectory(
        ticket,
        "failed" if failure else "finished",
        samples=() if failure else (sample,),
        turns=turns,
        reward=reward,
        score=reward,
        success=None if reward is None else reward > 0.5,
        failure=failure,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run-1"
    folder.mkdir()
    journal = Journal(folder, CONFIG, rows_per_shard=4)
    rewards = [0.0, 1.0, None, 0.25, 1.0]
    for i, reward in enumerate(rewards):
        one = trajectory(i, reward=reward, env="toy/B-v1" if i == 4 else "toy/A-v1")
        journal.dispatched(one.ticket, 0)
        journal.trajectory(one)
    for step in range(1, 5):
        metrics = {
            "rollout/reward_mean": step / 4,
            "rollout/success_mean": step / 8,
            "staleness/mean": 0.5,
            "staleness/max": 1.0,
            "train/tokens": 100.0,
            "time/wall_s": 10.0 * ((step + 1) // 2),  # two train_steps a batch
            "train/loss": -0.1 * step,
        }
        journal.metrics(step, step - 1, metrics)
    journal.close()
    return folder


def test_export_and_audit_agree_on_failed_and_aborted(tmp_path: Path, rollart: Command) -> None:
    journal = Journal(tmp_path, {**CONFIG, "env": []})
    kinds = [None, *[FailureKind.TIMEOUT] * 2, *[FailureKind.CANCELLED] * 3]
    for i, kind in enumerate(kinds):
        one = trajectory(i, reward=None if kind else 1.0)
        one = replace(one, failure=kind and Failure(kind, "env.step", "why"))
        journal.dispatched(one.ticket, 0)
        journal.trajectory(one)
    journal.close()
    found = json.loads(rollart("audit", str(tmp_path), "--json")[1])
    out = tmp_path / "x.jsonl"
    account = export([tmp_path], "jsonl", out, Filters())
    assert account.left_out == {"status failed": 2, "status aborted": 3}
    assert sum(found["failures"].values()) == 2
    assert found["attempts_aborted"] == 3
    assert found["attempts"] == account.written + account.left_out.total() + found["unrecorded"]
    for status, count in (("failed", 2), ("aborted", 3)):
        more = ("--out", str(tmp_path / status), "--status", status, "--json")
        assert json.loads(rollart("export", str(tmp_path), *more)[1])["written"] == count
    assert ["aborted", "3"] in [
        line.split()[:2] for line in rollart("audit", str(tmp_path))[1].splitlines()
    ]


@pytest.fixture
def rollart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def inner(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollart", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return inner


def test_a_course_is_what_the_journal_says(run_dir: Path) -> None:
    course = read_course(run_dir)
    assert course.reward == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert course.tokens_per_s == [(2, 20.0), (4, 20.0)]
    assert course.staleness_max[-1] == (4, 1.0)


def test_throughput_skips_where_a_resumed_run_counts_its_time_anew() -> None:
    tokens = [(n, 60.0) for n in range(1, 5)]
    assert throughput(tokens, [(1, 3.0), (2, 6.0), (3, 2.0), (4, 4.0)]) == [
        (1, 20.0),
        (2, 20.0),
        (4, 30.0),
    ]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_run_is_drawn(run_dir: Path, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in rollart[plot]")
    path = tmp_path / "out" / f"x.{ending}"
    plot([run_dir], path)
    content = path.read_bytes()
    begins = b"\x89PNG" if ending == "png" else b"<?xml"
    assert content.startswith(begins)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_drawn_says_so(
    run_dir: Path, tmp_path: Path, rollart: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(tmp_path, CONFIG).close()
    assert "has no recorded train_step" in rollart("plot", str(tmp_path))[2]
    code, _, err = rollart("plot", str(run_dir), "--out", str(tmp_path / "x.gif"))
    assert (code, ".png, .svg, .pdf" in err) == (1, True)
    assert "not a run directory" in rollart("plot", str(tmp_path / "nothing"))[2]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'rollart\[plot\]'"):
        plot([run_dir], tmp_path / "x.png")


def test_a_picture_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match=r"x\.png: cannot be written"):
        save(None, file / "x.png")


def test_json_lines_hold_what_is_asked_for_and_say_what_is_left_out(
    run_dir: Path, tmp_path: Path, rollart: Command
) -> None:
    out = tmp_path / "x.jsonl"
    settings = ("--min-reward", "0.2", "--env", "toy/A-v1", "--json")
    code, said, err = rollart("export", str(run_dir), "--out", str(out), *settings)
    assert code == 0, err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["task_index"], r["reward"], r["run"]) for r in rows] == [
        (1, 1.0, "run-1"),
        (3, 0.25, "run-1"),
    ]
    assert [t["action"] for t in rows[0]["turns"]] == ["é 0", "é 1"]
    assert "samples" not in rows[0]
    left = {"status failed": 1, "other environments": 1, "reward below 0.2": 1}
    assert json.loads(said) == {"path": str(out), "written": 2, "left_out": left}


def test_tokens_and_failed_ones_are_there_when_asked_for(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    export([run_dir], "jsonl", out, Filters(("failed", "finished")), tokens=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["status"] for r in rows].count("failed") == 1
    assert rows[0]["samples"][0]["token_ids"] == [1, 2, 3]
    assert rows[2]["failure"]["kind"] == "timeout"


def test_parquet_reads_back_as_the_same_trajectories(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.parquet"
    export([run_dir, run_dir], "parquet", out, Filters())
    back = read_shard(out)
    assert [t.ticket.task.index for t in back] == [0, 1, 3, 4] * 2
    np.testing.assert_array_equal(back[0].samples[0].inference_logprobs, [0, -1, -2])


def test_sharegpt_takes_turns(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    export([run_dir], "sharegpt", out, Filters(min_reward=1.0))
    first, _ = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(t["from"], t["value"]) for t in first["conversations"]] == [
        ("human", "page 0"),
        ("gpt", "é 0"),
        ("human", "page 1"),
        ("gpt", "é 1"),
    ]
    assert (first["env"], first["reward"], first["success"]) == ("toy/A-v1", 1.0, True)


def test_nothing_is_written_over_and_nothing_is_left_half(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("mine")
    with pytest.raises(UserError, match="the file exists"):
        export([run_dir], "jsonl", out, Filters())
    assert out.read_text() == "mine"
    empty = tmp_path / "empty"
    with pytest.raises(UserError, match=r"nothing to export: .*reward below 9"):
        export([run_dir], "parquet", empty / "y.parquet", Filters(min_reward=9))
    assert list(empty.iterdir()) == []


@pytest.fixture
def mixed_dir(tmp_path: Path) -> Path:
    """A run of two installed environments, one under a name, and one that is not installed."""
    folder = tmp_path / "mixed-1"
    folder.mkdir()
    envs = [
        {"id": "toy/FrozenLake-v1", "name": "ice", "weight": 1.0},
        {"id": "webshop/WebShop-v1", "name": "webshop/WebShop-v1", "weight": 1.0},
        {"id": "gone/Maze-v1", "name": "maze", "weight": 1.0},
    ]
    journal = Journal(folder, {**CONFIG, "env": envs})
    for i, env in enumerate(envs):
        one = trajectory(i, reward=1.0, env=str(env["name"]))
        journal.dispatched(one.ticket, 0)
        journal.trajectory(one)
    journal.close()
    return folder


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("ice",), ["ice"]),
        (("toy/FrozenLake-v1",), ["ice"]),
        (("frozenlake",), ["ice"]),
        (("webshop",), ["webshop/WebShop-v1"]),
        (("gone/Maze-v1", "webshop"), ["webshop/WebShop-v1", "maze"]),
    ],
)
def test_an_environment_is_asked_for_by_name_id_or_alias(
    mixed_dir: Path, tmp_path: Path, asked: tuple[str, ...], found: list[str]
) -> None:
    out = tmp_path / "x.jsonl"
    export([mixed_dir], "sharegpt", out, Filters(envs=asked))
    assert [json.loads(line)["env"] for line in out.read_text().splitlines()] == found


def test_a_run_of_one_environment_is_asked_for_by_alias_too(tmp_path: Path) -> None:
    one = trajectory(0, reward=1.0, env="webshop/WebShop-v1")
    journal = Journal(tmp_path, {**CONFIG, "env": {"id": "webshop/WebShop-v1", "goals": "human"}})
    journal.dispatched(one.ticket, 0)
    journal.trajectory(one)
    journal.close()
    assert export([tmp_path], "jsonl", tmp_path / "x", Filters(envs=("webshop",))).written == 1


def test_an_environment_that_no_run_has_is_told_with_those_there_are(
    run_dir: Path, mixed_dir: Path, tmp_path: Path, rollart: Command
) -> None:
    out = tmp_path / "x" / "y.jsonl"
    code, _, err = rollart("export", str(mixed_dir), "--out", str(out), "--env", "webshpo")
    assert (code, out.parent.exists()) == (1, False)
    assert "--env webshpo: the run has ice, webshop/WebShop-v1, maze" in err
    assert "Did you mean 'webshop'?" in err
    # the journal of run_dir says nothing of its environments
    assert export([run_dir, mixed_dir], "jsonl", out, Filters(envs=("frozenlake",))).written == 1
    with pytest.raises(UserError, match=r"nothing to export: .*other environments"):
        export([run_dir], "jsonl", tmp_path / "z.jsonl", Filters(envs=("frozenlake",)))


def test_options_without_effect_are_refused(run_dir: Path, rollart: Command) -> None:
    assert (
        "no effect with --to parquet"
        in rollart(*("export", str(run_dir), "--to", "parquet", "--tokens"))[2]
    )
    code, _, err = rollart("export", str(run_dir), "--to", "csv")
    assert (code, "jsonl, parquet, messages, sharegpt, hf" in err) == (2, True)
