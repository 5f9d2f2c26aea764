"""Runs whose rewards are RollArt's own: several at once, over a group, with what the env says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError, TooManyFailures
from rollart_core.runtime.launch import launch
from rollart_core.store.journal_reader import read_trajectories

PARTS: dict[str, Any] = {
    "right": {"reward": "numeric"},
    "short": {"reward": {"id": "group-length", "right": "numeric"}, "weight": 0.2},
    "other": {"reward": "group-diversity", "weight": 0.1},
}


def config(folder: Path, reward: object, **changes: object) -> Any:
    path = folder / "run.yaml"
    sections: dict[str, object] = {
        "name": "test",
        "seed": 3,
        "model": {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 320},
        "env": "questions",
        "reward": reward,
        "trackers": [],
        "rollout": {
            "groups_per_batch": 2,
            "group_size": 4,
            "max_new_tokens": 4,
            "max_context_tokens": 128,
        },
        "evaluation": {"tasks": 4, "greedy": False},
        "stop": {"batches": 2},
        "runs_dir": str(folder / "runs"),
    }
    path.write_text(yaml.safe_dump(sections | changes))
    return load_config(path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_weighted_group_is_scored_whole_and_its_parts_are_on_record(tmp_path: Path) -> None:
    reward = {"id": "weighted-group", "parts": PARTS}
    report = launch(resolve_run(config(tmp_path, reward)))
    assert report.batches == 2
    found = list(read_trajectories(Path(report.run_dir)))
    assert len(found) >= 16
    for trajectory in found:
        parts = trajectory.reward_components
        total = parts["right"] + 0.2 * parts["short"] + 0.1 * parts["other"]
        assert trajectory.reward == pytest.approx(total)
    assert any(trajectory.reward_components["other"] > 0 for trajectory in found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_environment_that_says_nothing_of_what_is_right_stops_the_run(tmp_path: Path) -> None:
    env = {"id": "rollart_testing:AsyncFakeEnv", "turns": 1}
    limits = {"window": 8, "max_rate": 0.5}
    with pytest.raises(TooManyFailures, match="provides no 'reference' to its reward"):
        launch(resolve_run(config(tmp_path, "numeric", env=env, failures=limits)))


def test_a_part_with_a_wrong_option_is_told_with_its_key(tmp_path: Path) -> None:
    wrong = {"right": {"reward": {"id": "numeric", "tolerance": 1}}}
    with pytest.raises(ConfigError, match=r"reward\.parts\.right\.reward.*tolerance"):
        resolve_run(config(tmp_path, {"id": "weighted", "parts": wrong}))
