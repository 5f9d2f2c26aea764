"""Runs in several environments at once: both are trained, in proportion, and told of apart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.runtime.launch import launch
from rollart_core.runtime.report import RunReport
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader, read_trajectories

FAKE = "rollart_testing:FakeEnv"
ENVS: list[dict[str, Any]] = [
    {"id": FAKE, "name": "long", "turns": 3, "weight": 2, "run": {"max_turns": 3}},
    {"id": FAKE, "name": "short", "turns": 1, "run": {"reward": f"{__name__}:LetterReward"}},
]


class LetterReward(Reward):
    """Likes long and early letters: a random model's answers differ in it."""

    def score(self, request: RewardRequest) -> RewardResult:
        text = "".join(m["content"] for m in request.messages if m["role"] == "assistant")
        return RewardResult(sum(map(ord, text)) % 101 / 101, {"letters": float(len(text))})


def run(folder: Path, *, resume: Path | None = None, **changes: Any) -> RunReport:
    base: dict[str, Any] = {
        "name": "mixed",
        "runs_dir": str(folder / "runs"),
        "seed": 3,
        "model": {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 320},
        "env": ENVS,
        "trackers": [],
        "rollout": {
            "groups_per_batch": 3,
            "group_size": 2,
            "max_turns": 2,
            "max_new_tokens": 4,
            "max_context_tokens": 160,
        },
        "algorithm": {"id": "grpo", "zero_advantage": "keep"},
        "evaluation": {"tasks": 6, "greedy": False},
        "checkpoint": {"every_batches": 2},
        "stop": {"batches": 4},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base | changes))
    if resume is not None:
        path = resume / "config.yaml"
    return launch(resolve_run(load_config(path)), resume=resume)


def trained(run_dir: Path) -> Counter[str]:
    """Return how many members of the batches were of which environment."""
    env_of = {t.ticket.ticket_id: t.ticket.task.env_id for t in read_trajectories(run_dir)}
    with JournalReader(run_dir) as journal:
        return Counter(env_of[t] for batch in journal.batches() for t in batch.ticket_ids)


@pytest.mark.slow
def test_both_are_trained_in_proportion_and_told_of_apart(tmp_path):
    report = run(tmp_path)
    run_dir = Path(report.run_dir)
    assert report.ok
    assert report.batches == 4
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert trained(run_dir) == {"long": 16, "short": 8}
    plain = json.loads((run_dir / "report.json").read_text())
    of_each = plain["envs"]
    assert [of_each[name]["trained"] for name in ("long", "short")] == [16, 8]
    assert [of_each[name]["weight"] for name in ("long", "short")] == [2, 1]
    assert [of_each[name]["score_after"]["n"] for name in ("long", "short")] == [4, 2]
    assert plain["score_after"]["n"] == 6
    for name in ("long", "short"):
        assert of_each[name]["failures"] == {}
        assert of_each[name]["rollout"]["score"] >= 0
        assert of_each[name]["why"] == ["everything shares local, the first pool with a device"]
        ran = of_each[name]["ran"]
        assert (ran["runtime"], ran["envs_on"]) == ("inline", "local")
        assert ran["engines"]["local"]["engine"] == "rollart/Embedded-v1"
        assert ran["engines"]["local"]["conversations"] >= of_each[name]["finished"]
    assert set(plain["placement"]["envs"]) == {"long", "short"}
    with JournalReader(run_dir) as journal:
        shown = [m.value for m in journal.metrics("env/short/trajectories")]
    assert sum(shown) == 8
    for trajectory in read_trajectories(run_dir):
        own = trajectory.ticket.task.env_id
        assert len(trajectory.turns) == {"long": 3, "short": 1}[own]
        assert ("letters" in trajectory.reward_components) == (own == "short")


@pytest.mark.slow
def test_a_resumed_mix_goes_on_in_proportion(tmp_path):
    first = run(tmp_path, stop={"batches": 2})
    run_dir = Path(first.run_dir)
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("batches: 2\n  wall_s", "batches: 6\n  wall_s"))
    again = run(tmp_path, resume=run_dir)
    assert again.ok
    assert again.batches == 6
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert trained(run_dir) == {"long": 24, "short": 12}


@pytest.mark.slow
def test_a_warm_start_demonstrates_both(tmp_path):
    warm = {"max_train_steps": 4, "check_tasks": 4, "check_split": "test", "batch_size": 6}
    report = run(
        tmp_path,
        warm_start=warm,
        stop={"batches": 1},
        rollout={
            "groups_per_batch": 3,
            "group_size": 2,
            "max_new_tokens": 4,
            "max_context_tokens": 160,
        },
    )
    assert report.warm_start is not None
    assert report.warm_start["train_steps"] == 4
