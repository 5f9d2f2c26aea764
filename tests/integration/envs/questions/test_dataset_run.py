"""Whole runs on a dataset: failures of a reward are typed, and the example learns."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import rollart_core
from rollart_core.cli.progress import report_table
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError, TooManyFailures, UserError
from rollart_core.runtime.launch import launch
from rollart_core.store.journal_reader import read_trajectories

ROWS = [{"question": f"Say {n}.", "answer": str(n % 10), "level": n} for n in range(300)]
MODEL = {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 300}
SMALL: dict[str, Any] = {
    "rollout": {
        "groups_per_batch": 2,
        "group_size": 4,
        "max_new_tokens": 3,
        "max_context_tokens": 96,
    },
    "evaluation": {"tasks": 8, "greedy": False},
    "failures": {"window": 8},
    "stop": {"batches": 2},
    "trackers": [],
}


def fit(folder: Path, reward: Any, rows: Any = ROWS, **settings: Any) -> Any:
    return rollart_core.fit(MODEL, rows, reward, **{**SMALL, "runs_dir": str(folder), **settings})


async def short(completion: str) -> float:
    return -len(completion) / 100


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fit_trains_with_functions_and_reports_each(tmp_path: Path) -> None:
    def right(completion: str, answer: str, level: int) -> dict[str, float]:
        assert level >= 0
        return {"score": float(answer in completion), "level": level}

    report = fit(tmp_path, [right, short], reward_weights=[1.0, 0.5])
    assert report.ok
    found = list(read_trajectories(Path(report.run_dir)))
    assert len(found) >= 16
    for trajectory in found:
        parts = trajectory.reward_components
        assert trajectory.reward == pytest.approx(parts["right"] + 0.5 * parts["short"])
        assert trajectory.score == trajectory.reward
        assert trajectory.success == (trajectory.reward >= 1)
    plain = report.as_dict()
    assert set(plain["rewards_after"]) == {"reward", "right", "short", "right.level"}
    assert plain["rewards_before"]["reward"] == plain["score_before"]
    rows = report_table(plain).renderables[0].columns[0].cells
    assert {"reward, sampled", "right.level, sampled"} <= set(rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("returned", "reason"),
    [("yes", "returned 'yes'"), (None, "returned None"), (ValueError("no tests"), "no tests")],
)
def test_a_reward_that_fails_stops_the_run_before_training(
    returned: Any, reason: str, tmp_path: Path
) -> None:
    def fails(completion: str) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    with pytest.raises(TooManyFailures, match=rf"reward.*{reason}"):
        fit(tmp_path, fails)


@pytest.mark.slow
def test_a_run_that_asks_for_more_tasks_than_there_are_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: 1000: split 'test' .* has \d+ task"):
        fit(tmp_path, short, evaluation={"tasks": 1000})


def test_fit_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    for rows, settings, reason in (
        (3, {}, "dataset: must be a file, a hub id or rows"),
        ([{"question": "q"}, {"answer": 1}], {}, "row 2: .*question.*is missing"),
        (ROWS, {"reward_weights": [1.0]}, "reward_weights: has no effect with one reward"),
        (ROWS, {"algorithm": "grppo"}, "no algorithm 'grppo'"),
    ):
        with pytest.raises(UserError, match=reason):
            fit(tmp_path, short, rows, **settings)
    with pytest.raises(UserError, match="two rewards have the same name"):
        fit(tmp_path, [short, short])
    with pytest.raises(UserError, match="has 1 for 2 rewards"):
        fit(tmp_path, [short, "numeric"], reward_weights=[1.0])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_example_learns(
    seed: int, tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "train.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(data)])
    runpy.run_path(str(repo_root / "examples/rlvr/make_data.py"))
    assert len({json.loads(line)["question"] for line in data.read_text().splitlines()}) == 4_000
    monkeypatch.syspath_prepend(str(repo_root / "examples/rlvr"))
    settings = ["reward=my_rewards:accuracy", f"data={data}", f"seed={seed}", "trackers=[]"]
    config = load_config(
        repo_root / "examples/rlvr.yaml", [*settings, f"runs_dir={tmp_path / 'runs'}"]
    )
    report = launch(resolve_run(config))
    assert report.before is not None
    assert report.after is not None
    assert report.before.success.mean < 0.4
    assert report.after.success.mean > 0.85
    assert "stop.when" in report.stop_reason
