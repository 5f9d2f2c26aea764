"""`rollart bench async`: concurrent rollout and training, compared with ``mode: sync``.

The environment's step time has a long tail (lognormal, mean 0.5 s, sigma 1), and the model is tiny.
Both modes have the same number of concurrent environments and of batches. The whole run alternates
between ``mode: sync`` and ``mode: async``.

``--case slow-reward``: a training run whose reward time has a long tail (lognormal, mean 2 s, sigma
1). It runs with scoring during the rollout (``scoring.overlap``), with each episode waiting for its
score in its slot, and in ``mode: sync``. The modes alternate, all with the same hedges.

``--case reward-faults``: a training run whose reward backend fails in every way, with an outage in
the middle. No ticket may be lost, no failure may count as a score, and every retry must be in the
journal.

Takes: ``case``, ``rounds``, ``batches``, ``short``. Gives: trained trajectories per second, and the
largest staleness; for a case, its rows. Never: counts start-up or evaluation.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import in_fresh_process, run_mapping
from rollart_bench.skip import require
from rollart_core.config.model import NewModel
from rollart_core.models.new import new_model
from rollart_core.runtime.report import RunReport
from rollart_core.store.journal_reader import JournalReader
from rollart_testing import FakeEnv

TAKES: Final = ("case", "rounds", "batches", "short")

MARK = 1.2
MAX_STALENESS = 2
NUM_ENVS = 32
STEP_MEAN_S = 0.5
MODES: Mapping[str, Mapping[str, object]] = {
    "async": {"mode": "async", "max_staleness": MAX_STALENESS},
    "sync": {"mode": "sync"},
}

MARK_STEP_TIME: Final = 1 / 0.6
"""The target: at most 0.6 of the blocking mode's step time."""
REWARD_SLOTS, REWARD_BATCH = 16, 32
REWARD_STEP_S, REWARD_S, SIGMA = 0.1, 2.0, 1.0
REWARD_STALENESS = 3
REWARD_MODES: Final[Mapping[str, Mapping[str, object]]] = {
    "overlapped": {"max_staleness": REWARD_STALENESS, "scoring": {"overlap": True, "hedge": {}}},
    "blocking": {"max_staleness": REWARD_STALENESS, "scoring": {"overlap": False, "hedge": {}}},
    "sync": {"mode": "sync", "scoring": {"overlap": False, "hedge": {}}},
}
FAULTS: Final = {"errors": 0.1, "hangs": 0.05, "garbage": 0.02}
OUTAGE_S: Final = (4.0, 14.0)
BACKEND: Final = "rollart_testing:FaultyBackend"

MODEL: Final = NewModel(kind="new", num_layers=1, width=64, num_heads=1, vocab_size=320)
GROUP_SIZE: Final = 8
TURNS: Final = 3


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
                echo(f"round {number} of {rounds}: {mode}: {speed:.2f} trained trajectories/s")
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
        ``trajectories_per_s`` of the RL phase, and ``stalest``: the largest staleness in versions.
    """
    config = waiting_run(asked, num_slots=NUM_ENVS, batch=NUM_ENVS)
    with ran({**config, **MODES[asked["mode"]]}) as report:
        return {
            "trajectories_per_s": report.batches * NUM_ENVS / report.train_wall_s,
            "stalest": max(map(int, report.staleness)),
        }


def slow_reward(asked: Options) -> list[dict[str, object]]:
    """Return the rows of `slow-reward`.

    Args:
        asked: ``short``: one round, faster rewards, no ``mode: sync``; ``rounds`` (2) and
            ``batches`` (24: the first and the last wait for slow scores in any mode; ``sync`` runs
            a third of them).
    """
    rounds = asked.integer("rounds", 1 if asked.short else 2)
    work: dict[str, Any] = {
        "batches": asked.integer("batches", 3 if asked.short else 24),
        "reward_s": 0.4 if asked.short else REWARD_S,
        "step_s": REWARD_STEP_S / 5 if asked.short else REWARD_STEP_S,
    }
    got: dict[str, list[float]] = {m: [] for m in REWARD_MODES if m != "sync" or not asked.short}
    with model_path() as work["model_path"]:
        for number in range(1, rounds + 1):
            for mode, took in got.items():
                one = {**work, "mode": mode, "seed": number}
                if mode == "sync":
                    one["batches"] = -(-work["batches"] // 3)
                measured = in_fresh_process(f"{__name__}:step_time", one)
                took.append(measured["step_s"])
                echo(f"round {number} of {rounds}: {mode}: {took[-1]:.2f} s a train step")
    return _slow_rows(got, work)


def _slow_rows(
    got: Mapping[str, list[float]], asked: Mapping[str, object]
) -> list[dict[str, object]]:
    shape = (
        f"{REWARD_BATCH} trajectories a batch, {REWARD_SLOTS} episodes at once, {TURNS} turns of "
        f"mean {asked['step_s']} s, rewards lognormal of mean {asked['reward_s']} s, "
        f"sigma {SIGMA:g}, hedged, max_staleness {REWARD_STALENESS}"
    )
    rows = []
    for peer, mark in (("blocking", MARK_STEP_TIME), ("sync", None)):
        if peer not in got:
            continue
        ratios = [a / b for a, b in zip(got[peer], got["overlapped"], strict=True)]
        rows.append(
            row(
                f"step time, scores during the rollout, compared with {peer} mode: {shape}",
                median(got["overlapped"]),
                median(got[peer]),
                f"{peer} mode",
                "s (ratio: theirs over ours)",
                ratios=ratios,
                mark=mark,
            )
        )
    return rows


def step_time(asked: Mapping[str, Any]) -> dict[str, float]:
    """Run one mode in this process.

    Args:
        asked: ``mode``, ``batches``, ``reward_s``, ``step_s``, ``seed``,
            ``model_path``.

    Returns:
        ``step_s``: seconds of the RL phase per batch.
    """
    mode = {key: value for key, value in REWARD_MODES[asked["mode"]].items() if key != "scoring"}
    backend = {"id": BACKEND, "mean_s": asked["reward_s"], "sigma": SIGMA}
    backend["seed"] = asked["seed"]
    scoring = {**_mapping(REWARD_MODES[asked["mode"]]["scoring"]), "backend": backend}
    scoring["max_concurrent"] = 256
    with ran({**_config(asked, scoring), **mode}) as report:
        return {"step_s": report.train_wall_s / report.batches}


def reward_faults(asked: Options) -> list[dict[str, object]]:
    """Return the rows of `reward-faults`.

    Args:
        asked: ``short``: an outage of 1 s, and fewer batches; ``batches`` (24).
    """
    work: dict[str, Any] = {
        "batches": asked.integer("batches", 6 if asked.short else 24),
        "outage_s": [0.5, 1.5] if asked.short else list(OUTAGE_S),
        "hang_s": 0.3 if asked.short else 1.0,
        "mean_s": 0.1 if asked.short else 0.3,
        "step_s": REWARD_STEP_S / 5 if asked.short else REWARD_STEP_S,
    }
    with model_path() as work["model_path"]:
        found = in_fresh_process(f"{__name__}:faulty_run", work)
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in FAULTS.items())
    begin, end = work["outage_s"]
    case = f"{shares}, an outage of {end - begin:g} s, {found['finished']:.0f} trajectories: "
    return [
        _fault_row(case + "lost", found["lost"], "0", found["lost"] == 0),
        _fault_row(
            case + "scored otherwise than their reward says",
            found["wrong"],
            "0",
            found["wrong"] == 0,
        ),
        _fault_row(
            case + "retries in the journal",
            found["retries_told"],
            f"all {found['faults']:.0f} faults",
            found["retries_told"] == found["faults"],
        ),
    ]


def _fault_row(case: str, ours: float, mark: str, meets: bool) -> dict[str, object]:
    return row(case, ours, None, None, "count", mark=mark, meets_mark=meets, required=True)


def faulty_run(asked: Mapping[str, Any]) -> dict[str, float]:
    """Run with a faulty backend in this process, and return the figures of its journal.

    Args:
        asked: ``batches``, ``outage_s``, ``hang_s``, ``mean_s``, ``step_s``, ``model_path``.

    Returns:
        ``finished`` trajectories, tickets ``lost``, rewards that are ``wrong``, ``faults`` of the
        backend (of calls that were not cancelled), and ``retries_told`` in the journal.
    """
    backend = {"id": BACKEND, "mean_s": asked["mean_s"], "sigma": 0.5, **FAULTS}
    backend["outage_s"] = asked["outage_s"]
    scoring = {"backend": backend, "try_s": asked["hang_s"] + asked["mean_s"] * 10}
    failures = {"max_retries": 0, "max_rate": 1.0}
    config = {**_config(asked, scoring), "max_staleness": 2, "failures": failures}
    with ran(config) as report, JournalReader(Path(report.run_dir)) as journal:
        events = Counter(event.kind for event in journal.events())
        rows = list(journal.trajectories())
    (totals,) = report.rewards.values()
    finished = [r for r in rows if r.status != "failed"]
    return {
        "finished": len(finished),
        "lost": float(events["LoseTicket"] + events["reward_failed"]),
        "wrong": float(sum(r.reward != r.score for r in finished)),
        "faults": totals["broken"],
        "retries_told": float(events["reward_retry"]),
    }


def _mapping(value: object) -> dict[str, object]:
    assert isinstance(value, Mapping)
    return dict(value)


def _config(asked: Mapping[str, Any], scoring: Mapping[str, object]) -> dict[str, object]:
    return {
        **waiting_run(asked, num_slots=REWARD_SLOTS, batch=REWARD_BATCH),
        "name": "bench-rewards",
        "reward": "env-return",
        "scoring": dict(scoring),
        "deadlines": {"step_s": 120.0, "reward_s": 120.0},
    }


CASES: Mapping[str, Callable[[Options], list[dict[str, object]]]] = {
    "slow-reward": slow_reward,
    "reward-faults": reward_faults,
}


@contextmanager
def model_path() -> Iterator[str]:
    """Provide the folder of a new tiny model, inside the context."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(new_model(folder, MODEL, FakeEnv().corpus(), seed=0))


def waiting_run(asked: Mapping[str, Any], *, num_slots: int, batch: int) -> dict[str, object]:
    """Return the base config of a run for a case.

    Args:
        asked: ``batches``; ``step_s``, the mean time of an env step; ``model_path``.
        num_slots: The number of concurrent episodes.
        batch: Trajectories per batch.
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
            "max_concurrent": num_slots,
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
    """Run a config, and provide its report while its folder exists."""
    with tempfile.TemporaryDirectory() as folder:
        yield run_mapping({**config, "runs_dir": folder})
