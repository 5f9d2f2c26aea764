"""What a report says of each environment of a mixture."""

from __future__ import annotations

import io
import math

from rich.console import Console

from rollart_core.cli.progress import report_table
from rollart_core.contracts.hardware import Placement
from rollart_core.runtime.report import reasons_for
from rollart_core.store.metrics import Totals
from rollart_core.types import Failure, FailureKind, Task, Ticket, Trajectory

NAMES = ("a/Maze-v1", "a/Maze-v1#1", "shop")


ALL = "environments run on cores"


def trajectory(env: str, **said: object) -> Trajectory:
    task = Task(env, "train", 0, 0)
    ticket = Ticket("t", task, group_id="g", index=0)
    return Trajectory(ticket=ticket, turns=(), status="finished", **said)


def test_reasons_are_those_that_name_the_environment_and_those_for_all() -> None:
    reasons = (
        "a/Maze-v1 generates 100% on big: decode-heavy",
        "a/Maze-v1#1 generates 100% on small: prefill-heavy",
        "environments run on cpu (a/Maze-v1, shop), big (a/Maze-v1#1)",
        "the config says so",
        "the trainer has a device of big to itself",
        "shopping is fun",
    )
    placement = Placement(envs={}, engines={}, trainer="big", reasons=reasons)
    of = {name: reasons_for(placement, name, NAMES) for name in NAMES}
    assert of["a/Maze-v1"] == (reasons[0], *reasons[2:4], reasons[5])
    assert of["a/Maze-v1#1"] == (reasons[1], *reasons[2:4], reasons[5])
    assert of["shop"] == (*reasons[2:4], reasons[5])


def test_attempts_are_counted_by_environment_and_by_how_they_failed() -> None:
    totals = Totals()
    totals.finish(trajectory("maze", reward=1.0, score=2.0, success=True))
    totals.finish(trajectory("maze", reward=0.0, score=1.0, success=False))
    for env, kind in (("maze", FailureKind.REWARD), ("shop", FailureKind.SANDBOX)):
        totals.fail(trajectory(env, failure=Failure(kind, "env.step", "no")))
    found = totals.by_env(["maze", "shop", "idle"])
    assert found["maze"] == {
        "finished": 2,
        "trained": 0,
        "failures": {"reward": 1},
        "rollout": {"success": 0.5, "score": 1.5, "reward": 0.5},
    }
    assert found["shop"]["failures"] == {"sandbox": 1}
    assert found["shop"]["rollout"] is None
    assert found["idle"] == {"finished": 0, "trained": 0, "failures": {}, "rollout": None}
    assert totals.failures == {"reward": 1, "sandbox": 1}


def test_the_table_says_where_each_environment_ran_and_why() -> None:
    ran = {
        "envs_on": "cores",
        "engines": {
            "local": {"engine": "rollart/Embedded-v1", "conversations": 1},
            "served": {"engine": "rollart/SGLang-v1", "conversations": 3},
        },
    }
    rollout = {"success": 0.25, "score": 0.5, "reward": 0.5}
    maze = {"trained": 8, "finished": 9, "failures": {"timeout": 2}, "rollout": rollout}
    report = {
        "envs": {
            "maze": {**maze, "ran": ran, "why": ["maze generates 75% on served", ALL]},
            "shop": {"trained": 4, "finished": 4, "failures": {}, "ran": ran, "why": [ALL]},
        }
    }
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_table(report))
    lines = console.export_text().splitlines()
    row = next(line for line in lines if "maze" in line)
    for cell in ("8", "9", "0.25", "0.5", "timeout 2", "cores", "75% served, 25% local"):
        assert cell in row
    assert any("why maze" in line and "75% on served" in line for line in lines)
    assert not any("why shop" in line for line in lines)
    assert [line.split() for line in lines if ALL in line] == [["why", *ALL.split()]]


def test_the_table_says_what_was_not_learned_and_how_many_tasks_were_played() -> None:
    score = {"mean": 0.5, "low": 0.2, "high": 0.8, "n": 60, "num_clusters": 20}
    report = {"score_after": score, "tasks_after": 20, "train_steps": 5, "has_signal": False}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_table(report))
    text = console.export_text()
    assert "Held-out tasks (20 different)" in text
    assert "5; no reward differed within a group" in text


def test_a_score_over_one_task_has_no_interval() -> None:
    score = {"mean": 1.0, "low": None, "high": None, "n": 1}
    gain = {"mean": 0.5, "low": -math.inf, "high": math.inf, "n": 1}
    success = {"mean": 1.0, "low": 0.207, "high": 1.0, "n": 1}
    report = {"success_after": success, "score_after": score, "score_gain": gain}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_table(report))
    text = console.export_text()
    assert "1.000 of 1 " in text
    assert "100.0% [20.7%, 100.0%] of 1 " in text
    assert ["score", "gained", "+0.500"] in [line.split() for line in text.splitlines()]
