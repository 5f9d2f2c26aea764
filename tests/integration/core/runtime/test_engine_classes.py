"""Several classes of inference engines in one run: who answers whom, and one staleness over all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart_core.config.load import load_config
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.errors import ConfigError
from rollart_core.runtime.inline import InlineRuntime
from rollart_core.runtime.launch import launch
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import read_trajectories

FAKE = "rollart_testing:FakeEnv"
NAMES = ("long", "short", "lake")
WIDE = {"name": "wide", "engine": {"id": "embedded", "max_sessions": 8}, "count": 1}
MAPPER = {"id": "static", "engines": {"long": "wide", "short": "engine", "*": "wide"}}


def run(folder: Path, **changes: Any) -> ResolvedRun:
    base: dict[str, Any] = {
        "name": "classes",
        "runs_dir": str(folder / "runs"),
        "seed": 3,
        "model": {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 320},
        "env": [
            {"id": FAKE, "name": "long", "turns": 3, "weight": 2},
            {"id": FAKE, "name": "short", "turns": 1},
            {"id": "toy/FrozenLake-v1", "name": "lake", "run": {"max_turns": 3}},
        ],
        "engines": [WIDE],
        "mapper": MAPPER,
        "max_staleness": 2,
        "weights": "delta",
        "trackers": [],
        "rollout": {
            "groups_per_batch": 4,
            "group_size": 2,
            "redundant": 1,
            "max_turns": 3,
            "max_new_tokens": 4,
            "max_context_tokens": 320,
        },
        "algorithm": {"id": "grpo", "zero_advantage": "keep"},
        "evaluation": {"tasks": 3, "greedy": False},
        "stop": {"batches": 4},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base | changes))
    return resolve_run(load_config(path), source="run.yaml")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_class_answers_the_environments_that_the_mapper_sends_there(tmp_path: Path) -> None:
    report = launch(run(tmp_path))
    run_dir = Path(report.run_dir)
    assert report.ok
    assert report.batches == 4
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert max(map(int, report.staleness)) <= 2
    plain = json.loads((run_dir / "report.json").read_text())
    answered = {
        name: {pool for pool, one in of_it["ran"]["engines"].items() if one["conversations"]}
        for name, of_it in plain["envs"].items()
    }
    assert answered["short"] <= {"engine", "wide"}
    assert "wide" in answered["long"]
    assert "wide" in answered["lake"]
    for name in NAMES:
        assert plain["envs"][name]["trained"] > 0
        planned = {p: e["planned_share"] for p, e in plain["envs"][name]["ran"]["engines"].items()}
        assert planned["engine" if name == "short" else "wide"] == 1.0
    # both were given the weights of every publication, each by its own end of the channel
    swaps = plain["weights"]
    assert set(swaps) == {"engine", "engine-1"}
    versions = {
        int(version)
        for trajectory in read_trajectories(run_dir)
        for sample in trajectory.samples
        for version in sample.policy_versions[sample.loss_mask]
    }
    assert len(versions) > 1


def test_the_pools_of_one_machine_are_its_classes(tmp_path: Path) -> None:
    resolved = run(tmp_path, engines=[{**WIDE, "count": 2}])
    inline = InlineRuntime(resolved, tmp_path)
    try:
        assert [inline.pool_of("engine", i) for i in range(3)] == ["engine", "wide", "wide"]
        assert inline.pool_of("trainer", 0) == "local"
    finally:
        asyncio.run(inline.close())
    assert resolved.engine_on("wide").options["max_sessions"] == 8
    assert resolved.engine_on("engine").options["max_sessions"] == 256


def test_a_resolved_run_reads_back_with_its_classes(tmp_path: Path) -> None:
    first = run(tmp_path)
    path = tmp_path / "again.yaml"
    path.write_text(first.to_yaml())
    again = resolve_run(load_config(path))
    assert again.engines == first.engines
    assert again.as_dict() == first.as_dict()


ON_RAY = {"kind": "ray", "pools": [{"name": "cores", "count": 4, "roles": ["envs", "trainer"]}]}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engines": [WIDE, WIDE]}, r"engines\.1\.name: 'wide' is already used"),
        ({"engines": [{**WIDE, "name": "local"}]}, r"engines\.0\.name: 'local' is already used"),
        ({"deterministic": True}, r"deterministic: true: which class of engines answers"),
        ({"engines": [{**WIDE, "engine": "embeded"}]}, r"engines\.0\.engine: no inference engine"),
        (
            {"engines": [{**WIDE, "engine": {"id": "openai", "base_url": "http://x/v1"}}]},
            r"engines\.0\.engine: rollart/OpenAI-v1 serves its server's initial weights",
        ),
        ({"runtime": ON_RAY}, r"engines\.0\.name: runtime\.pools has no pool 'wide'"),
        (
            {"runtime": ON_RAY, "engines": [{**WIDE, "name": "cores"}]},
            r"engines\.0\.name: pool 'cores' may not run engines",
        ),
        ({"engines": [{**WIDE, "share": 0.5}]}, r"engines\.0\.share: unknown key"),
        (
            {"scaling": {"engines": {"max": 1}}},
            r"scaling\.engines: the run starts with runtime\.num_engines: 2",
        ),
    ],
)
def test_classes_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        run(tmp_path, **changes)
