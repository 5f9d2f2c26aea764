"""Small runs for tests of `runtime: ray`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rollart_core.config_load import validate
from rollart_core.resolve import ResolvedRun, resolve_run

POOLS = {
    "id": "static",
    "trainer": "train_node",
    "engines": {"*": "gen_node"},
    "envs": {"*": "env_node"},
}


def small_run(runs_dir: Path, **changes: Any) -> ResolvedRun:
    """Return a deterministic run of some seconds."""
    mapping: dict[str, Any] = {
        "name": "small",
        "deterministic": True,
        "runs_dir": str(runs_dir),
        "model": {
            **{"kind": "new", "num_layers": 1, "width": 32, "num_heads": 2, "num_kv_heads": 1},
            **{"head_dim": 16, "ffn_width": 64, "vocab_size": 320},
        },
        "env": {"id": "toy/FrozenLake-v1", "hole_probability": 0.05},
        "rollout": {
            **{"groups_per_batch": 2, "group_size": 4, "max_turns": 4, "max_new_tokens": 4},
            "max_context_tokens": 384,
        },
        "evaluation": {"tasks": 8, "greedy": False},
        "trackers": [],
        "stop": {"batches": 5},
        **changes,
    }
    config, problems = validate(mapping)
    assert config is not None, problems
    assert not problems
    return resolve_run(config)


def weights_of(run_dir: str) -> str:
    """Return a digest of the weights a run ended with."""
    path = Path(run_dir) / "model-trained" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()
