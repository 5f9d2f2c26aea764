"""`rollart bench async`: rolling out while training, beside doing one after the other.

With ``--case slow-reward`` or ``--case reward-faults``: see ``async_rewards.py``.

An environment whose step takes a long-tailed time (lognormal, mean 0.5 s, sigma 1), a tiny model,
the same number of environments at once and of batches: the whole run in ``mode: sync`` and in
``mode: async``, in turns.

Takes: ``rounds``, ``batches``, ``short``. Gives: trained trajectories per second, and the largest
staleness. Never: counts start-up or evaluation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from rollart_core.bench import async_rewards
from rollart_core.bench.rows import machine, row, tell
from rollart_core.bench.sides import in_fresh_process, run_mapping
from rollart_core.config import NewModel
from rollart_core.errors import UserError
from rollart_core.models.new import new_model
from rollart_core.testing import FakeEnv

MARK = 1.2
MAX_STALENESS = 2
NUM_ENVS, GROUP_SIZE, TURNS = 32, 8, 3
STEP_MEAN_S = 0.5
MODEL = NewModel(kind="new", num_layers=1, width=64, num_heads=1, vocab_size=320)
MODES: Mapping[str, Mapping[str, object]] = {
    "async": {"mode": "async", "max_staleness": MAX_STALENESS},
    "sync": {"mode": "sync"},
}
CASES: Mapping[str, Callable[[Mapping[str, object]], list[dict[str, object]]]] = {
    "slow-reward": async_rewards.slow_reward,
    "reward-faults": async_rewards.reward_faults,
}


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``case``; ``short``: one round, shorter env steps; ``rounds`` (2) and ``batches``
            (6).

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: When there is no such case.
    """
    case = options.get("case")
    if case is not None:
        if case not in CASES:
            raise UserError(f"bench async has no case {case!r}; it has {', '.join(CASES)}")
        return {"name": f"async {case}", "machine": machine(), "rows": CASES[str(case)](options)}
    short = bool(options.get("short"))
    rounds = int(str(options.get("rounds", 1 if short else 2)))
    asked: dict[str, object] = {
        "batches": int(str(options.get("batches", 4 if short else 6))),
        "step_s": 0.1 if short else STEP_MEAN_S,
    }
    got: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        asked["model_path"] = str(new_model(folder, MODEL, FakeEnv().corpus(), seed=0))
        for number in range(1, rounds + 1):
            for mode, results in got.items():
                results.append(in_fresh_process(f"{__name__}:measure", {**asked, "mode": mode}))
                speed = results[-1]["trajectories_per_s"]
                tell(f"round {number} of {rounds}: {mode}: {speed:.2f} trained trajectories/s")
    return {"name": "async", "machine": machine(), "rows": _rows(got, asked)}


def _rows(
    got: Mapping[str, list[dict[str, Any]]], asked: Mapping[str, object]
) -> list[dict[str, object]]:
    ours, peer = ([r["trajectories_per_s"] for r in got[mode]] for mode in MODES)
    stalest = max(r["stalest"] for r in got["async"])
    case = (
        f"{NUM_ENVS} envs at once, {TURNS} turns, step lognormal of mean {asked['step_s']} s, "
        f"{asked['batches']} batches of {NUM_ENVS}, max_staleness {MAX_STALENESS}"
    )
    return [
        row(
            case,
            median(ours),
            median(peer),
            "mode: sync",
            "trained trajectories/s",
            ratios=[a / b for a, b in zip(ours, peer, strict=True)],
            mark=MARK,
        ),
        row(
            "largest staleness of a trained sample",
            stalest,
            None,
            None,
            "versions",
            mark=f"<= {MAX_STALENESS}",
            meets_mark=stalest <= MAX_STALENESS,
        ),
    ]


def measure(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Run one mode in this process.

    Args:
        asked: ``mode``, ``batches``, ``step_s``, ``model_path``.

    Returns:
        ``trajectories_per_s`` of the RL phase, and ``stalest``, in versions.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = run_mapping(_config(asked) | {"runs_dir": folder})
    return {
        "trajectories_per_s": report.batches * NUM_ENVS / report.train_wall_s,
        "stalest": max(map(int, report.staleness)),
    }


def _config(asked: Mapping[str, Any]) -> dict[str, object]:
    return {
        "name": "bench-async",
        **MODES[asked["mode"]],
        "runtime": {"env_processes": 0},
        "model": {"path": asked["model_path"], "device": "cpu"},
        "env": {
            "id": "rollart_core.testing:AsyncFakeEnv",
            "turns": TURNS,
            "delay_s": asked["step_s"],
            "delay_sigma": 1.0,
        },
        "trackers": [],
        "rollout": {
            "groups_per_batch": NUM_ENVS // GROUP_SIZE,
            "group_size": GROUP_SIZE,
            "max_concurrent": NUM_ENVS,
            "max_turns": TURNS,
            "max_new_tokens": 4,
            "max_context_tokens": 256,
        },
        "deadlines": {"step_s": 120.0},
        "evaluation": {"tasks": 1, "greedy": False},
        "checkpoint": {"every_batches": 1_000_000},
        "stop": {"batches": asked["batches"]},
    }
