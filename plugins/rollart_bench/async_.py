"""`rollart bench async`: rolling out while training, beside doing one after the other.

With ``--case slow-reward`` or ``--case reward-faults``: see ``async_rewards.py``.

An environment whose step takes a long-tailed time (lognormal, mean 0.5 s, sigma 1), a tiny model,
the same number of environments at once and of batches: the whole run in ``mode: sync`` and in
``mode: async``, in turns.

Takes: ``rounds``, ``batches``, ``short``. Gives: trained trajectories per second, and the largest
staleness. Never: counts start-up or evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final

from rollart_bench import async_rewards
from rollart_bench.options import Options
from rollart_bench.rows import result, row, tell
from rollart_bench.sides import in_fresh_process
from rollart_bench.skip import require
from rollart_bench.waiting_run import TURNS, model_path, ran, waiting_run

TAKES: Final = ("case", "rounds", "batches", "short")

MARK = 1.2
MAX_STALENESS = 2
NUM_ENVS = 32
STEP_MEAN_S = 0.5
MODES: Mapping[str, Mapping[str, object]] = {
    "async": {"mode": "async", "max_staleness": MAX_STALENESS},
    "sync": {"mode": "sync"},
}
CASES: Mapping[str, Callable[[Options], list[dict[str, object]]]] = {
    "slow-reward": async_rewards.slow_reward,
    "reward-faults": async_rewards.reward_faults,
}


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``case``; ``short``: one round, shorter env steps, fewer batches; ``rounds`` (2)
            and ``batches`` (6).

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is wrong.
    """
    asked = Options("async", options)
    require("torch", "transformers", extra="train")
    if "case" in asked:
        case = asked.choice("case", tuple(CASES), "")
        return result(f"async {case}", CASES[case](asked))
    rounds = asked.integer("rounds", 1 if asked.short else 2)
    work: dict[str, object] = {
        "batches": asked.integer("batches", 3 if asked.short else 6),
        "step_s": 0.1 if asked.short else STEP_MEAN_S,
    }
    got: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with model_path() as work["model_path"]:
        for number in range(1, rounds + 1):
            for mode, results in got.items():
                results.append(in_fresh_process(f"{__name__}:measure", {**work, "mode": mode}))
                speed = results[-1]["trajectories_per_s"]
                tell(f"round {number} of {rounds}: {mode}: {speed:.2f} trained trajectories/s")
    return result("async", _rows(got, work))


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
            required=True,
        ),
    ]


def measure(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Run one mode in this process.

    Args:
        asked: ``mode``, ``batches``, ``step_s``, ``model_path``.

    Returns:
        ``trajectories_per_s`` of the RL phase, and ``stalest``, in versions.
    """
    config = waiting_run(asked, num_seats=NUM_ENVS, batch=NUM_ENVS)
    with ran({**config, **MODES[asked["mode"]]}) as report:
        return {
            "trajectories_per_s": report.batches * NUM_ENVS / report.train_wall_s,
            "stalest": max(map(int, report.staleness)),
        }
