"""`rollart bench algorithms`: check that every registered algorithm learns.

The task is ``toy/Bandit-v1`` with two arms and two turns. A policy that pulls any arm is right in
both turns in a quarter of all episodes. Each algorithm starts from the same tiny model, which only
knows the form of the game, and has 60 seconds. If it needs a critic, it gets one. If it needs a
teacher, it gets a model that was taught which arm pays. If it learns from demonstrations, it gets
those of the environment's expert.

Takes: ``only`` (algorithms, separated by commas), ``batches``, ``seed``, ``wall_s`` (60),
``picture`` (runs/bench-algorithms.png), ``runs_dir``, ``short``. Gives: success on held-out tasks
before and after, and the curves of all in one picture. Never: omits a registered algorithm without
``only``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from rollart_bench import bandit
from rollart_bench.bandit import Learned
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.errors import RollartError
from rollart_core.plugins import registry
from rollart_core.plugins.manager import plugins
from rollart_view.pictures import new_figure, save, smoothed

TAKES: Final = (
    "only",
    "batches",
    "wall_s",
    "seed",
    "picture",
    "runs_dir",
    "beginner",
    "expert",
    "short",
)

ENV: Mapping[str, object] = {"arms": 2, "turns": 2}
MARK = 0.9
"""Target for the success on held-out tasks, which starts at about a quarter."""
WALL_S = 60.0
BATCHES, SHORT_BATCHES = 30, 2
SETTINGS: Mapping[str, Mapping[str, object]] = {}
"""Alias -> its overrides of the run config."""
NUM_COLUMNS = 4
NUM_EPISODES = bandit.GROUPS_PER_BATCH * bandit.GROUP_SIZE


@dataclass(frozen=True, slots=True)
class AlgorithmOutcome:
    """The result of one algorithm."""

    name: str
    learned: Learned | None
    error: str = ""
    """Why there is no run; empty if there is one."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """The settings that all runs share."""

    runs_dir: Path
    beginner: Mapping[str, object]
    """The model section of the run config, for the model that RL starts from."""
    expert: str
    """Empty if no algorithm needs a teacher."""
    batches: int
    wall_s: float
    seed: int


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``only`` (all), ``batches`` (30), ``wall_s`` (60), ``seed`` (0), ``picture``: its
            path; ``runs_dir``: the folder to keep run directories in; ``beginner`` and ``expert``:
            model folders to use instead of new ones; ``short``: GRPO, two batches, from a model
            that is taught in the same run.

    Returns:
        The object of ``rollart bench --json``, with ``picture`` and ``runs``.
    """
    asked = Options("algorithms", options)
    require("torch", "transformers", extra="train")
    require("matplotlib", extra="bench")
    names = _names(asked.names("only", (), ("grpo",) if asked.short else ()))
    batches = asked.integer("batches", SHORT_BATCHES if asked.short else BATCHES)
    wall_s, seed = asked.number("wall_s", WALL_S), asked.integer("seed", 0, least=0)
    picture = asked.path("picture", "runs/bench-algorithms.png")
    beginner, expert = asked.text("beginner", ""), asked.text("expert", "")
    with bandit.runs_folder(asked) as runs_dir:
        begin = bandit.short_run()
        if beginner or not asked.short:
            model = beginner or bandit.beginner(runs_dir, ENV)
            begin = {"model": {"path": model, "device": "cpu"}}
        if any(_spec(name).needs_teacher for name in names):
            expert = expert or bandit.expert(runs_dir, ENV)
        work = _Pending(runs_dir, begin, expert, batches, wall_s, seed)
        outcomes = [_try(name, work) for name in names]
    draw(outcomes, picture)
    echo(f"curves: {picture}")
    told = [_told(o) for o in outcomes]
    return result("algorithms", rows(outcomes), picture=str(picture), runs=told)


def _names(asked: Sequence[str]) -> list[str]:
    """Return the algorithms to run, by alias if there is one. Default: all.

    Raises:
        UserError: If one is not registered.
    """
    return [_spec(name).alias or _spec(name).id for name in asked or _registered()]


def _registered() -> list[str]:
    return list(plugins().registered("algorithms"))


def _spec(name: str) -> AlgorithmSpec:
    return cast(AlgorithmSpec, registry.spec("algorithms", name))


def _try(name: str, asked: _Pending) -> AlgorithmOutcome:
    """Run one algorithm. If it fails, report it, so that the others continue."""
    try:
        learned = bandit.learn(config_of(name, asked))
    except RollartError as e:
        echo(f"{name}: {e}")
        return AlgorithmOutcome(name, None, str(e))
    seconds = learned.report.train_wall_s
    echo(f"{name}: {learned.before:.0%} to {learned.after:.0%} in {seconds:.0f} s")
    return AlgorithmOutcome(name, learned)


def config_of(name: str, asked: _Pending) -> dict[str, Any]:
    """Return the run config of an algorithm, with its requirements and overrides."""
    spec = _spec(name)
    in_words = "".join(c if c.isalnum() else "-" for c in name)
    config = bandit.run_config(f"learns-{in_words}", asked.runs_dir, ENV) | {
        "seed": asked.seed,
        **asked.beginner,
        "algorithm": {"id": name},
        "stop": {"batches": asked.batches, "wall_s": asked.wall_s},
    }
    if spec.learns_from == "demonstrations":  # the expert's are always the same
        alone = {"groups_per_batch": NUM_EPISODES, "group_size": 1, "min_group_size": 1}
        config = bandit.merged(config, {"rollout": alone})
    if spec.needs_critic:
        config["critic"] = {"backbone": "own"}
    if spec.needs_teacher:
        config["teacher"] = {"path": asked.expert}
    return bandit.merged(config, SETTINGS.get(name, {}))


def rows(outcomes: Sequence[AlgorithmOutcome]) -> list[dict[str, object]]:
    """Return a row for each algorithm: whether it learned in time."""
    return [
        row(
            f"{o.name}: sampled success{f' ({o.error})' if o.error else ''}",
            o.learned.after if o.learned else None,
            o.learned.before if o.learned else None,
            "before",
            "of held-out tasks",
            mark=f"> {MARK}",
            meets_mark=o.learned is not None and o.learned.after > MARK,
        )
        for o in outcomes
    ]


def _told(outcome: AlgorithmOutcome) -> dict[str, object]:
    learned = outcome.learned
    if learned is None:
        return {"algorithm": outcome.name, "error": outcome.error}
    report = learned.report
    return {
        "algorithm": outcome.name,
        "run_dir": report.run_dir,
        "ok": report.ok,
        "stop_reason": report.stop_reason,
        "batches": report.batches,
        "train_wall_s": round(report.train_wall_s, 1),
        "cpu_s": round(learned.cpu_s, 1),
        "before": learned.before,
        "after": learned.after,
        "trained": list(learned.success),
    }


def draw(outcomes: Sequence[AlgorithmOutcome], path: Path) -> None:
    """Draw one small curve per algorithm: training batches, and held-out tasks at both ends.

    Raises:
        UserError: If matplotlib is not installed.
    """
    num_columns = min(NUM_COLUMNS, len(outcomes))
    num_rows = math.ceil(len(outcomes) / num_columns)
    size = (2.6 * num_columns + 0.6, 1.9 * num_rows + 0.6)
    figure = new_figure("bench algorithms", "bench", figsize=size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, outcome in zip(panels, outcomes, strict=False):
        _panel(axes, outcome)
    for axes in panels[len(outcomes) :]:
        axes.set_axis_off()
    figure.supxlabel("batch", fontsize="small")
    figure.supylabel("success; points: held-out tasks", fontsize="small")
    save(figure, path, dpi=100)


def _panel(axes: Any, outcome: AlgorithmOutcome) -> None:
    axes.set_title(outcome.name, fontsize="small")
    axes.set_ylim(0, 1.02)
    axes.axhline(MARK, color="grey", linewidth=0.8, linestyle=":")
    if outcome.learned is None:
        axes.text(0.5, 0.5, "did not run", transform=axes.transAxes, ha="center")
        return
    learned = outcome.learned
    if _spec(outcome.name).learns_from == "rollouts":  # otherwise they are the expert's
        axes.plot(range(1, len(learned.success) + 1), smoothed(learned.success, over=3))
    ends = (0, len(learned.success) + 1)
    axes.plot(ends, (learned.before, learned.after), "o", markersize=4)
