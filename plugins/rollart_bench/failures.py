"""`rollart bench failures`: what is learned if the best arm fails more often than others.

``toy/Bandit-v1`` has a second best arm that pays 0.8. In training, the best arm of a sign fails in
40% of pulls, and every other arm in 10%. On held-out tasks none fails. The benchmark compares five
policies for failures, from one starting model, with several seeds each:

    no failures           what is learned in a reliable environment
    excluded and retried  RollArt's policy: a failure is not a reward; the attempt is repeated with
                          the same random numbers, so the policy chooses the same arm again
    replaced by others    ``rollout.redundant``: a group starts with spare members that replace the
                          failed ones: new samples, as retries in other frameworks
    dropped               ``failures.max_retries: 0``: the group is trained without the member
    counted as 0          the environment hides its failures and pays nothing

Takes: ``seeds`` (3), ``batches``, ``picture`` (runs/bench-failures.png), ``runs_dir``, ``short``.
Gives: the share of the best arm after training and on average during it. Never: measures speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rollart_bench import bandit
from rollart_bench.bandit import Learned
from rollart_bench.learn import SMOOTHED_OVER
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_view.pictures import new_figure, save, smoothed

TAKES: Final = ("seeds", "batches", "picture", "runs_dir", "model", "short")

BEST_FAILS, OTHERS_FAIL = 0.4, 0.1
DECOY = 0.8
"""Above the mean pay of the best arm if its failures count as 0: ``1 - BEST_FAILS``."""
MAX_RETRIES = 10
"""With these retries, about one of 10,000 pulls of the best arm is given up."""
ENV: Mapping[str, object] = {"decoy": DECOY}
STUCK: Mapping[str, object] = {"best_fails": BEST_FAILS, "others_fail": OTHERS_FAIL}
NONE, RETRIED, REPLACED, DROPPED, ZERO = (
    "no failures",
    "excluded and retried",
    "replaced by others",
    "dropped",
    "counted as 0",
)
NUM_SPARE = bandit.GROUP_SIZE
"""Enough spare members that a group is almost never short."""
LEAST_NOISE = 0.02
"""Means closer than this count as equal, even if the seeds of each vary less."""


@dataclass(frozen=True, slots=True)
class FailureMode:
    """One policy for failures."""

    changes: Mapping[str, object]
    """Overrides of the run config."""
    policys_share: Callable[[float], float]
    """Maps the share of the best arm in trained data to its share in the policy's choices."""


def _among_survivors(share: float) -> float:
    """Correct for the missing episodes of the best arm."""
    best, others = share / (1 - BEST_FAILS), (1 - share) / (1 - OTHERS_FAIL)
    return best / (best + others)


WAYS: Mapping[str, FailureMode] = {
    NONE: FailureMode({"env": ENV}, lambda share: share),
    RETRIED: FailureMode(
        {"env": {**ENV, **STUCK}, "failures": {"max_retries": MAX_RETRIES, "max_rate": 1.0}},
        lambda share: share,
    ),
    REPLACED: FailureMode(
        {
            "env": {**ENV, **STUCK},
            "failures": {"max_retries": 0, "max_rate": 1.0},
            "rollout": {"redundant": NUM_SPARE},
        },
        _among_survivors,
    ),
    DROPPED: FailureMode(
        {"env": {**ENV, **STUCK}, "failures": {"max_retries": 0, "max_rate": 1.0}},
        _among_survivors,
    ),
    ZERO: FailureMode(
        {"env": {**ENV, **STUCK, "failures": "zero"}},
        # A failed episode counts in the total, and not as a success.
        lambda share: min(1.0, share / (1 - BEST_FAILS)),
    ),
}


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``seeds`` (3), ``batches`` (30), ``picture``: its path; ``runs_dir``: the folder to
            keep run directories in; ``model``: a folder to use instead of a new model; ``short``:
            one seed, 2 batches of two policies, 32 held-out tasks, from a model that is trained
            less.

    Returns:
        The object of ``rollart bench --json``, with ``picture`` and ``runs``.
    """
    asked = Options("failures", options)
    require("torch", "transformers", extra="train")
    require("matplotlib", extra="bench")
    num_seeds = asked.integer("seeds", 1 if asked.short else 3)
    batches = asked.integer("batches", 2 if asked.short else 30)
    picture = asked.path("picture", "runs/bench-failures.png")
    ways = (NONE, RETRIED) if asked.short else tuple(WAYS)
    got: dict[str, list[Learned]] = {name: [] for name in ways}
    with bandit.runs_folder(asked) as runs_dir:
        model = asked.text("model", "") or bandit.beginner(runs_dir, ENV, short=asked.short)
        begin: dict[str, object] = {"model": {"path": model, "device": "cpu"}}
        if asked.short:
            begin["evaluation"] = bandit.SHORT_EVALUATION
        for seed in range(num_seeds):
            for name, runs in got.items():
                runs.append(bandit.learn(_config(name, runs_dir, begin, seed, batches)))
                echo(f"seed {seed}, {name}: the best arm in {runs[-1].after:.0%} of pulls")
    draw(got, picture)
    echo(f"picture: {picture}")
    told = [_told(name, seed, r) for name, rs in got.items() for seed, r in enumerate(rs)]
    return result("failures", rows(got), picture=str(picture), runs=told)


def _config(
    name: str, runs_dir: Path, begin: Mapping[str, object], seed: int, batches: int
) -> dict[str, Any]:
    common = bandit.run_config(f"failures-{name.replace(' ', '-')}", runs_dir, {}) | {
        "seed": seed,
        **begin,
        "algorithm": {"id": "grpo", "proximal": "inference"},
        "stop": {"batches": batches},
    }
    return bandit.merged(common, WAYS[name].changes)


def rows(got: Mapping[str, Sequence[Learned]]) -> list[dict[str, object]]:
    """Return the results of each policy, compared with those without failures."""
    measures: Mapping[str, Callable[[str, Learned], float]] = {
        "best arm on held-out tasks after training": lambda name, r: r.after,
        "best arm on average over training": lambda name, r: fmean(policy_curve(name, r.success)),
    }
    found = []
    for measure, of in measures.items():
        sound = [of(NONE, r) for r in got[NONE]]
        for name, runs in got.items():
            if name == NONE:
                continue
            ours = [of(name, r) for r in runs]
            found.append(_row(f"{name}: {measure}", ours, sound, marked=name == RETRIED))
    return found


def _row(case: str, ours: list[float], sound: list[float], *, marked: bool) -> dict[str, object]:
    chance = bandit.noise(ours, sound)
    allowed = max(LEAST_NOISE, chance)
    apart = abs(bandit.mean(ours) - bandit.mean(sound))
    told = marked and not math.isnan(chance)
    seeds = ", ".join(f"{x:.3f}" for x in ours)
    return row(
        f"{case} ({seeds})",
        bandit.mean(ours),
        bandit.mean(sound),
        NONE,
        "of pulls",
        mark=f"within {allowed:.3f} of {NONE}" if told else None,
        meets_mark=apart <= allowed if told else None,
    )


def policy_curve(name: str, trained: Sequence[float]) -> list[float]:
    """Return how often the policy chose the best arm per batch, derived from the trained data."""
    return [WAYS[name].policys_share(share) for share in trained]


def _told(name: str, seed: int, learned: Learned) -> dict[str, object]:
    report = learned.report
    return {
        "way": name,
        "seed": seed,
        "run_dir": report.run_dir,
        "ok": report.ok,
        "before": learned.before,
        "after": learned.after,
        "failures": dict(report.failures),
        "batches": report.batches,
        "cpu_s": round(learned.cpu_s, 1),
        "trained": list(learned.success),
    }


def draw(got: Mapping[str, Sequence[Learned]], path: Path) -> None:
    """Draw what the policy chooses next to what the trained data suggests.

    Raises:
        UserError: If matplotlib is not installed.
    """
    figure = new_figure("bench failures", "bench", figsize=(10, 4.5), layout="constrained")
    chosen, trained = figure.subplots(1, 2, sharey=True)
    for name, runs in got.items():
        _band(chosen, name, [policy_curve(name, r.success) for r in runs])
        _band(trained, name, [list(r.success) for r in runs])
        line = chosen.get_lines()[-1]
        after = [r.after for r in runs]
        x = len(runs[0].success) + 1
        chosen.plot([x] * len(after), after, "o", color=line.get_color(), markersize=4)
        line.set_zorder(1 if name == NONE else 2)
    chosen.set(title="what the policy chooses", ylabel="share of the best arm", ylim=(0, 1.02))
    trained.set(title="what is trained: episodes that succeeded")
    for axes in (chosen, trained):
        axes.set_xlabel("batch")
    names, lines = chosen.get_legend_handles_labels()[::-1]
    figure.legend(lines, names, loc="outside lower center", ncols=len(got), fontsize="small")
    save(figure, path, dpi=100)


def _band(axes: Any, name: str, curves: Sequence[Sequence[float]]) -> None:
    """Draw the mean over seeds, and the range from minimum to maximum."""
    even = [smoothed(c, SMOOTHED_OVER) for c in curves]
    by_batch = list(zip(*even, strict=False))
    x = range(1, len(by_batch) + 1)
    # Another line may cover it.
    broad = {"linewidth": 5, "alpha": 0.5} if name == NONE else {}
    (line,) = axes.plot(x, [fmean(v) for v in by_batch], label=name, **broad)
    low, high = [min(v) for v in by_batch], [max(v) for v in by_batch]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
