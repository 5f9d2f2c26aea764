"""`rollart bench learn`: what an example learns with several seeds, and a picture of the curves.

Takes: ``seeds`` (3), ``config`` (examples/webshop.yaml), ``picture`` (runs/bench-learn.png),
``short``; every other option overrides a key of the config. Gives: success on held-out tasks before
and after RL, sampled and greedy, with 95% intervals. Never: hides a run that stopped early.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import BenchSkipped, require
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.runtime.launch import launch
from rollart_core.store.journal_reader import JournalReader
from rollart_view.pictures import new_figure, save, smoothed

MARK = 0.85
"""Target for the sampled success after RL, from about 0.37 before: ROLL's published curve."""
SMOOTHED_OVER = 9
"""Batches."""
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = {
    "evaluation.tasks": 16,
    "evaluation.greedy": False,
    "warm_start.max_train_steps": 20,
    "rollout.groups_per_batch": 4,
    "stop.batches": 3,
    "stop.wall_s": None,
}
START = {"warm_start.until_success": 0.37}
"""The start of the published curve."""
TAKES: Final = ("short", "seeds", "config", "picture")
CONFIG: Final = True
"""Every other option is a key of the run config, and is checked as such."""
KINDS = ("success_before", "success_after", "greedy_before", "greedy_after")


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``seeds``: the number of seeds, from the config's own on; ``config``: a run config;
            ``picture``: the path of the picture; ``short``: FrozenLake, one seed, 3 batches; all
            others: keys of the config.

    Returns:
        The object of ``rollart bench --json``, with ``picture`` and ``runs``.
    """
    asked = Options("learn", options)
    require("torch", "transformers", extra="train")
    require("matplotlib", extra="bench")
    path = example(asked.text("config", "hello.yaml" if asked.short else "webshop.yaml"))
    overrides = overrides_of(SHORT if asked.short else START)
    overrides += overrides_of(dict(flat({k: v for k, v in options.items() if k not in TAKES})))
    first = load_config(path, overrides).seed
    num_seeds = asked.integer("seeds", 1 if asked.short else 3)
    picture = asked.path("picture", "runs/bench-learn.png")
    curves = []
    for seed in range(first, first + num_seeds):
        curves.append(_learn(path, [*overrides, f"seed={seed}"], seed))
    mark = None if asked.short else MARK
    draw(curves, picture, title=path.stem, mark=mark)
    echo(f"curves: {picture}")
    told = [{"seed": c.seed, **c.report} for c in curves]
    return result("learn", _rows(curves, mark), picture=str(picture), runs=told)


@dataclass(frozen=True, slots=True)
class Curve:
    """One run."""

    seed: int
    report: Mapping[str, Any]
    """The part of the run's report that this benchmark uses."""
    wall_s: tuple[float, ...]
    """Seconds of the RL phase at the end of each batch."""
    success: tuple[float, ...]
    """Mean success of each batch of training tasks."""


class Messages:
    """Writes phases and messages of a run to stderr, with a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def phase(self, name: str, detail: str = "") -> None:
        """Write the name of the phase that starts."""
        self.message(f"{name} {detail}".strip())

    def progress(self, fraction: float | None, line: Mapping[str, float | str]) -> None:
        """Ignore it: the picture shows the curve."""

    def message(self, text: str) -> None:
        """Write a message."""
        echo(f"{self._name}: {text}")


def _learn(path: Path, overrides: Sequence[str], seed: int) -> Curve:
    run = resolve_run(load_config(path, overrides), source=str(path))
    report = launch(run, observer=Messages(f"seed {seed}")).as_dict()
    run_dir = Path(str(report["run_dir"]))
    kept = ("run_dir", "ok", "stop_reason", "batches", "wall_s", "train_wall_s")
    success = {k: _success(report[k]) for k in KINDS}
    return Curve(seed, {k: report[k] for k in kept} | success, *_read_curve(run_dir))


def _success(estimate: object) -> object:
    """Return the success of one evaluation in a report. Greedy ones have more figures."""
    return (
        estimate["success"] if isinstance(estimate, Mapping) and "success" in estimate else estimate
    )


def _read_curve(run_dir: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return seconds and success per batch. Metrics are per update, and a batch can have two.

    A resumed run can have a version twice. The later one counts.
    """
    with JournalReader(run_dir) as journal:
        wall_s, success = (
            {m.policy_version: m.value for m in journal.metrics(name) if m.value is not None}
            for name in ("time/wall_s", "rollout/success_mean")
        )
    versions = sorted(wall_s.keys() & success.keys())
    return tuple(wall_s[v] for v in versions), tuple(success[v] for v in versions)


def _rows(curves: Sequence[Curve], mark: float | None) -> list[dict[str, object]]:
    rows = [_row(f"seed {c.seed}, {_spell(c.report)}", [c], mark) for c in curves]
    if len(curves) > 1 and all(c.report["success_after"] for c in curves):
        rows.append(_row(f"mean of {len(curves)} seeds", curves, mark))
    return rows


def _row(case: str, curves: Sequence[Curve], mark: float | None) -> dict[str, object]:
    after, before = (_mean_of(curves, kind) for kind in ("success_after", "success_before"))
    return row(
        f"{case}: sampled success",
        after,
        before,
        "before RL",
        "of held-out tasks",
        mark=None if mark is None else f"> {mark}",
        meets_mark=None if mark is None else after is not None and after > mark,
    )


def _mean_of(curves: Sequence[Curve], kind: str) -> float | None:
    found = [c.report[kind]["mean"] for c in curves if c.report[kind]]
    return fmean(found) if found else None


def _spell(report: Mapping[str, Any]) -> str:
    """Return the estimates with their intervals, and the stop reason if the run stopped early."""
    kinds = {
        k: f"{e['mean']:.2f} [{e['low']:.2f}, {e['high']:.2f}]" if (e := report[k]) else "none"
        for k in KINDS
    }
    text = f"sampled {kinds['success_before']} to {kinds['success_after']}, "
    text += f"greedy {kinds['greedy_before']} to {kinds['greedy_after']}"
    return text if report["ok"] else f"{text}, stopped: {report['stop_reason']}"


def draw(curves: Sequence[Curve], path: Path, *, title: str, mark: float | None) -> None:
    """Write one picture of all smoothed curves, with the held-out estimates at both ends.

    Raises:
        UserError: If matplotlib is not installed.
    """
    figure = new_figure("bench learn", "bench", figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        success = smoothed(curve.success, SMOOTHED_OVER)
        (line,) = axes.plot(curve.wall_s, success, label=f"seed {curve.seed}")
        ends = (0.0, curve.report["train_wall_s"])
        for x, kind in zip(ends, ("success_before", "success_after"), strict=True):
            if estimate := curve.report[kind]:
                mean, low, high = (estimate[k] for k in ("mean", "low", "high"))
                spread = [[mean - low], [high - mean]]
                axes.errorbar(x, mean, yerr=spread, fmt="o", capsize=3, color=line.get_color())
    if mark is not None:
        axes.axhline(mark, color="grey", linewidth=0.8, linestyle=":", label=f"mark: {mark}")
    axes.set(
        title=f"{title}: sampled success",
        xlabel="seconds of RL training",
        ylabel=f"lines: training batches, mean of {SMOOTHED_OVER}; points: held-out tasks",
        ylim=(0, 1),
    )
    axes.legend(loc="lower right")
    save(figure, path)


def example(name: str) -> Path:
    """Return a config: a given path, or an example of the source tree.

    Raises:
        BenchSkipped: If it does not exist, and the examples are not available.
    """
    given = Path(name)
    if given.exists() or (EXAMPLES / name).exists():
        return given if given.exists() else EXAMPLES / name
    if not EXAMPLES.is_dir():
        raise BenchSkipped(
            f"the examples are not part of the installed package, so there is no {name}: run it in "
            "a checkout, or give config=PATH"
        )
    return given


def overrides_of(keys: Mapping[str, object]) -> list[str]:
    """Return keys of a config as ``key=value`` arguments with dotted keys."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def flat(nested: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values."""
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
