"""Small runs for tests of `runtime: ray`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rollart_core.config_load import validate
from rollart_core.engine.journal_reader import JournalReader
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
        "max_staleness": 0,
        "runs_dir": str(runs_dir),
        "model": {
            **{"kind": "new", "num_layers": 2, "width": 64, "num_heads": 2, "num_kv_heads": 1},
            **{"head_dim": 32, "ffn_width": 128, "vocab_size": 320},
        },
        "env": {"id": "toy/FrozenLake-v1", "hint": False},
        "warm_start": {"max_train_steps": 60, "check_every": 30, "check_tasks": 8},
        "rollout": {
            **{"groups_per_batch": 2, "group_size": 4, "max_turns": 8, "max_new_tokens": 4},
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


def gradients_of(run_dir: str) -> list[float]:
    """Return the norm of the gradient of each update of a run."""
    with JournalReader(Path(run_dir)) as journal:
        return [m.value for m in journal.metrics("train/grad_norm") if m.value is not None]


def weights_of(run_dir: str) -> str:
    """Return a digest of the weights a run ended with."""
    path = Path(run_dir) / "model-trained" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()
