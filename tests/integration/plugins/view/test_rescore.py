"""`rollart rescore`, on journals as runs write them, with real rewards and their service."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import whole_runs

from rollart_core.cli import main
from rollart_core.config.base import PluginRef
from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.store.journal import Journal
from rollart_core.store.journal_reader import read_trajectories
from rollart_core.types import Failure, FailureKind, Message, Task, Ticket, Trajectory, Turn
from rollart_view.rescore import request_of, rescore

Command = Callable[..., tuple[int, str, str]]


class Reference(Reward):
    """1 if the answer is the reference of the task; wants one."""

    stateless = False

    def score(self, request: RewardRequest) -> RewardResult:
        value = float(request.context["reference"] == request.answer)
        return RewardResult(value, {"turns": float(request.num_turns), **request.components})


class Rank(GroupReward):
    """The share of members with a smaller return."""

    stateless = False

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        returns = [request.env_return for request in requests]
        return [RewardResult(sum(r < own for r in returns) / len(returns)) for own in returns]


def trajectory(group: int, index: int, answer: str, **changes: Any) -> Trajectory:
    name = f"g{group:07d}"
    ticket = Ticket(
        f"{name}.{index}", Task(f"toy/{'AB'[group]}-v1", "train", group, 7), name, index
    )
    fields: dict[str, Any] = {
        "turns": (Turn("1 + 2?", answer, 5, 2, "stop", 0.0, 0.1, 0.1),),
        "reward": 0.5,
        "score": float(index),
        "env_components": {"style": 0.25},
        "reward_components": {"style": 0.25, "old": 1.0},
        "context": {"reference": "3"},
    }
    return Trajectory(ticket, "finished", **{**fields, **changes})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run-1"
    folder.mkdir()
    lost = Failure(FailureKind.TIMEOUT, "env.step", "late")
    failed = trajectory(1, 1, "3", reward=None, score=None, failure=lost)
    journal = Journal(folder, {"mode": "sync"})
    for one in (
        trajectory(0, 0, "3"),
        trajectory(0, 1, "4"),
        trajectory(1, 0, "3", context={}),
        Trajectory(failed.ticket, "failed", turns=failed.turns, failure=lost),
    ):
        journal.dispatched(one.ticket, 0)
        journal.trajectory(one)
    journal.close()
    return folder


@pytest.fixture
def rollart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def inner(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollart", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return inner


def test_old_and_new_rewards_are_compared_and_failures_have_a_type(
    run_dir: Path, tmp_path: Path, rollart: Command
) -> None:
    before = (run_dir / "journal.db").read_bytes()
    out = tmp_path / "new.jsonl"
    asked = ("rescore", str(run_dir), "--reward", f"{__name__}:Reference")
    code, said, err = rollart(*asked, "--json", "--out", str(out))
    assert code == 0, err
    found = json.loads(said)
    assert (found["scored"], found["old_mean"], found["new_mean"], found["changed"]) == (
        2,
        0.5,
        0.5,
        2,
    )
    assert found["failures"] == {"reward": 1}
    assert found["left_out"] == {"status failed": 1}
    assert found["envs"]["toy/B-v1"]["new_mean"] is None
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["old"], row["new"]) for row in rows] == [(0.5, 1.0), (0.5, 0.0), (0.5, None)]
    assert rows[0]["components"] == {"turns": 1.0, "style": 0.25}
    assert (rows[2]["failure"]["kind"], rows[2]["failure"]["boundary"]) == (
        "reward",
        "reward.score",
    )
    assert (run_dir / "journal.db").read_bytes() == before
    code, _, err = rollart(*asked, "--out", str(out))
    assert (code, "the file exists" in err) == (1, True)
    code, said, _ = rollart(*asked)
    assert (code, "failed: 1 (reward in reward.score), such as:" in said) == (0, True)
    assert "not scored: 1 (status failed)" in said


def test_a_reward_of_groups_gets_each_group_at_once(run_dir: Path) -> None:
    found = rescore(run_dir, PluginRef(id=f"{__name__}:Rank"))
    assert [(row.ticket_id, row.new) for row in found.rows] == [
        ("g0000000.0", 0.0),
        ("g0000000.1", 0.5),
        ("g0000001.0", 0.0),
    ]


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("exact-mach", "Did you mean"),
        ("{id: exact-match, nonsense: 1}", "nonsense"),
        ("{id: [", "must be a name, or options as in"),
    ],
)
def test_a_wrong_reward_is_refused(run_dir: Path, rollart: Command, reward: str, why: str) -> None:
    code, _, err = rollart("rescore", str(run_dir), "--reward", reward)
    assert (code, err.count("\n")) == (1, 1), err
    assert why in err


def test_where_nothing_can_be_scored_the_exit_code_says_so(
    tmp_path: Path, rollart: Command
) -> None:
    journal = Journal(tmp_path, {"mode": "sync"})
    asked = ("rescore", str(tmp_path), "--reward", f"{__name__}:Reference")
    assert "has no trajectory with a reward" in rollart(*asked)[2]
    one = trajectory(0, 0, "3", context={})
    journal.dispatched(one.ticket, 0)
    journal.trajectory(one)
    journal.close()
    code, said, _ = rollart(*asked)
    assert (code, "no data of the environment for rewards" in said) == (1, True)


def test_a_request_has_the_messages_that_were_sent() -> None:
    messages = (Message(role="system", content="s"), Message(role="assistant", content="<think>a"))
    turns = (Turn("system: s", "a", 1, 1, "stop", 0, 0, 0, messages=messages),)
    request = request_of(trajectory(0, 0, "3", turns=turns))
    assert (request.messages, request.num_loss_tokens) == (messages, 1)


def test_the_reward_of_a_real_run_gives_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = whole_runs.run(tmp_path)
    folder = Path(report.run_dir)
    found = rescore(folder, PluginRef(id="support.whole_runs:LetterReward"))
    recorded = [t for t in read_trajectories(folder) if t.reward is not None]
    assert len(found.rows) == len(recorded) > 0
    assert [(row.old, row.new) for row in found.rows] == [(t.reward, t.reward) for t in recorded]
