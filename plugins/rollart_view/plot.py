"""``rollart plot``: plot the metrics of one or more runs from their journals.

Takes: run directories. Gives: one picture with a panel for each of reward, success, staleness,
tokens per second and loss, by train_step, and a line at each rollback of a guard. Never: writes to
a run's journal, or shows a train_step that was rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from rollart_core.errors import UserError
from rollart_core.scheduling.run_guard import GUARD_TRIPPED
from rollart_core.store.journal_reader import JournalReader
from rollart_view.pictures import new_figure, save, smoothed

SMOOTHED_OVER = 5
Series = list[tuple[int, float]]
"""(train_step, value), ascending."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The metrics of one run's journal, by panel."""

    name: str
    reward: Series
    success: Series
    staleness_mean: Series
    staleness_max: Series
    tokens_per_s: Series
    loss: Series
    rollbacks: tuple[int, ...] = ()
    """The train_steps that the guard rolled back to."""

    @property
    def is_empty(self) -> bool:
        """True if no train_step is recorded."""
        return not (self.reward or self.loss)


def read_course(run_dir: Path) -> Curve:
    """Return the metrics of a run, finished or in progress.

    Raises:
        JournalError: If it is not a run directory.
    """
    with JournalReader(run_dir) as journal, journal.snapshot():

        def read(name: str) -> Series:
            rows = journal.metrics(name)
            return [(r.train_step, r.value) for r in rows if r.value is not None]

        return Curve(
            name=run_dir.resolve().name,
            reward=read("rollout/reward_mean"),
            success=read("rollout/success_mean"),
            staleness_mean=read("staleness/mean"),
            staleness_max=read("staleness/max"),
            tokens_per_s=throughput(read("train/tokens"), read("time/wall_s")),
            loss=read("train/loss"),
            rollbacks=_rollbacks(journal),
        )


def _rollbacks(journal: JournalReader) -> tuple[int, ...]:
    """Return the last train_step before each checkpoint that the guard rolled back to."""
    rows = journal.metrics("rollout/reward_mean", rolled_back=True)
    tripped = journal.events(kind=GUARD_TRIPPED)
    with journal.decoding():
        versions = [int(json.loads(event.payload)["back_to"]) for event in tripped]
    return tuple(
        max((r.train_step for r in rows if r.policy_version < version), default=0)
        for version in versions
    )


def throughput(tokens: Series, wall_s: Series) -> Series:
    """Return the trained tokens per second of the whole loop, by the last train_step of each batch.

    Args:
        tokens: Tokens of each train_step.
        wall_s: Of the RL phase at the end of the batch that a train_step was part of; train_steps
            of one batch have the same.
    """
    of_step, found, before = dict(tokens), [], 0.0
    for ended, steps in groupby(wall_s, key=lambda point: point[1]):
        numbers = [step for step, _ in steps]
        count = sum(of_step.get(n, 0.0) for n in numbers)
        if ended > before and count:  # a resumed run may restart its clock
            found.append((numbers[-1], count / (ended - before)))
        before = ended
    return found


def plot(run_dirs: Sequence[Path], path: Path) -> None:
    """Draw the metrics of runs into one picture.

    Raises:
        UserError: If matplotlib is missing, no run has trained yet, or it cannot be written.
        JournalError: If one is not a run directory.
    """
    courses = [read_course(run_dir) for run_dir in run_dirs]
    empty = [c.name for c in courses if c.is_empty]
    if empty:
        raise UserError(f"{empty[0]} has no recorded train_step: there is nothing to draw yet")
    figure = new_figure("plot", "plot", figsize=(10, 9), layout="constrained")
    draw(figure, courses)
    save(figure, path)


def plot_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="A png, svg or pdf file. Default: plot.png in the run (here for several runs).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Plot reward, success, staleness, tokens per second and loss against ``train_step``.

    Example: rollart plot runs/hello-20260101-120000 --out hello.svg
    """
    path = out or (runs[0] / "plot.png" if len(runs) == 1 else Path("plot.png"))
    plot(runs, path)
    typer.echo(str(path))


def draw(figure: Any, courses: Sequence[Curve]) -> None:
    """Draw the panels."""
    panels = list(figure.subplots(3, 2, sharex=True).flat)
    lines: Mapping[str, str] = {
        "reward": "reward, batch mean",
        "success": "success, share of the batch",
        "tokens_per_s": "trained tokens per second",
        "loss": "loss",
    }
    for axes, (what, title) in zip(panels, lines.items(), strict=False):
        axes.set_title(title, fontsize="medium")
        for number, course in enumerate(courses):
            _line(axes, getattr(course, what), f"C{number % 10}", course.name)
    panels[1].set_ylim(-0.02, 1.02)
    _staleness(panels[4], courses)
    for axes in panels[2:5]:
        axes.set_xlabel("train_step")
        axes.tick_params(labelbottom=True)
    panels[5].set_axis_off()
    for axes in panels[:5]:
        _mark_rollbacks(axes, courses)
    handles, labels = panels[0].get_legend_handles_labels()
    panels[5].legend(handles, labels, loc="center", fontsize="small")


def _line(axes: Any, series: Series, colour: str, label: str) -> None:
    """Draw a faint line, and a smoothed line over its neighbours."""
    steps, values = [s for s, _ in series], [v for _, v in series]
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(steps, smoothed(values, SMOOTHED_OVER), color=colour, label=label)


def _mark_rollbacks(axes: Any, courses: Sequence[Curve]) -> None:
    """Draw a line at each rollback of a run's guard."""
    for number, course in enumerate(courses):
        for i, step in enumerate(course.rollbacks):
            label = f"{course.name}: guard rollback" if i == 0 else None
            axes.axvline(
                step, color=f"C{number % 10}", linestyle="--", linewidth=1, alpha=0.7, label=label
            )


def _staleness(axes: Any, courses: Sequence[Curve]) -> None:
    axes.set_title("staleness in versions: mean, and maximum (dotted)", fontsize="medium")
    for number, course in enumerate(courses):
        _line(axes, course.staleness_mean, f"C{number % 10}", course.name)
        steps = [s for s, _ in course.staleness_max]
        most = [v for _, v in course.staleness_max]
        axes.plot(steps, most, color=f"C{number % 10}", linestyle=":", linewidth=1)
    axes.set_ylim(bottom=-0.05)
