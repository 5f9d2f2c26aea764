"""A run that trains on an agent and on an environment that is stepped, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.runtime.launch import launch
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import read_trajectories

AGENT = {"id": "rollart_testing.agents:FakeAgent", "name": "agent", "turns": 2, "tasks": 4}
STEPPED = {"id": "rollart_testing:FakeEnv", "name": "stepped", "turns": 2}
RUN: dict[str, Any] = {
    "name": "agents",
    "seed": 3,
    "model": {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 320},
    "trackers": [],
    "rollout": {
        "groups_per_batch": 4,
        "group_size": 2,
        "max_new_tokens": 4,
        "max_turns": 3,
        "max_context_tokens": 200,
    },
    "algorithm": {"id": "grpo", "zero_advantage": "keep"},
    "evaluation": {"tasks": 2, "greedy": False},
    "stop": {"batches": 2},
}


def resolved(folder: Path, **changes: Any):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"runs_dir": str(folder / "runs")} | changes))
    return resolve_run(load_config(path))


@pytest.mark.slow
def test_agents_are_trained_beside_what_is_stepped(tmp_path):
    troubled = {**AGENT, "trouble": "raise", "trouble_every": 2}
    retries = {"max_retries": 12}  # which attempts meet trouble is a matter of who comes when
    report = launch(resolved(tmp_path, env=[troubled, STEPPED], failures=retries))
    assert report.ok
    run_dir = Path(report.run_dir)
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    found = [t for t in read_trajectories(run_dir) if t.failure is None]
    agents = [t for t in found if t.ticket.task.env_id == "agent"]
    assert len(agents) == 8
    assert {t.ticket.task.env_id for t in found} == {"agent", "stepped"}
    for trajectory in agents:
        assert [turn.reward for turn in trajectory.turns[:-1]] == [0.0]
        assert trajectory.num_loss_tokens == sum(t.num_new_tokens for t in trajectory.turns)
    plain = json.loads((run_dir / "report.json").read_text())
    assert plain["failures"]["environment"] > 0
    assert set(plain["failures"]) == {"environment"}
