"""A training run that mostly waits, for its environments or its rewards: of `rollart bench async`.

Takes: how many episodes at once and how large batches; what a case adds. Gives: a run config, and
the report of a run. Never: measures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from rollart_bench.sides import run_mapping
from rollart_core.config.model import NewModel
from rollart_core.models.new import new_model
from rollart_core.runtime.report import RunReport
from rollart_testing import FakeEnv

MODEL: Final = NewModel(kind="new", num_layers=1, width=64, num_heads=1, vocab_size=320)
GROUP_SIZE: Final = 8
TURNS: Final = 3


@contextmanager
def model_path() -> Iterator[str]:
    """Give the folder of a new tiny model, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(new_model(folder, MODEL, FakeEnv().corpus(), seed=0))


def waiting_run(asked: Mapping[str, Any], *, num_seats: int, batch: int) -> dict[str, object]:
    """Return the config of a run, for a case to add to.

    Args:
        asked: ``batches``; ``step_s``, the mean of an env step; ``model_path``.
        num_seats: Episodes at once.
        batch: Trajectories of one batch.
    """
    return {
        "name": "bench-async",
        "runtime": {"env_processes": 0},
        "model": {"path": asked["model_path"], "device": "cpu"},
        "env": {
            "id": "rollart_testing:AsyncFakeEnv",
            "turns": TURNS,
            "delay_s": asked["step_s"],
            "delay_sigma": 1.0,
        },
        "trackers": [],
        "rollout": {
            "groups_per_batch": batch // GROUP_SIZE,
            "group_size": GROUP_SIZE,
            "max_concurrent": num_seats,
            "max_turns": TURNS,
            "max_new_tokens": 4,
            "max_context_tokens": 256,
        },
        "deadlines": {"step_s": 120.0},
        "evaluation": {"tasks": 1, "greedy": False},
        "checkpoint": {"every_batches": 1_000_000},
        "stop": {"batches": asked["batches"]},
    }


@contextmanager
def ran(config: Mapping[str, object]) -> Iterator[RunReport]:
    """Run it, and give its report for as long as its folder is there."""
    with tempfile.TemporaryDirectory() as folder:
        yield run_mapping({**config, "runs_dir": folder})
