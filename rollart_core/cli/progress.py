"""Progress of a run: a live bar on a terminal, plain lines elsewhere, a table at the end.

Takes: the events of :class:`rollart_core.scheduling.observer.RunObserver` and a finished report.
Gives: text on one console. Never: makes decisions, or blocks a run.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from rollart_core.scheduling.observer import RunObserver

PLAIN_EVERY_S = 5.0
_BAR_WIDTH = 30
_LIVE_WIDTH = 12

Line = Mapping[str, float | str]


@contextmanager
def display(console: Console) -> Iterator[RunObserver]:
    """Show a run on ``console``: live on a terminal, otherwise in plain lines."""
    if not console.is_terminal:
        plain = PlainDisplay(console)
        yield plain
        plain.flush()
        return
    phase = Column(no_wrap=True, min_width=len("evaluate before"))
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=phase),
        BarColumn(bar_width=_LIVE_WIDTH, table_column=Column(min_width=_LIVE_WIDTH)),
        TimeElapsedColumn(),
        TextColumn("{task.fields[line]}", markup=False, table_column=rest),
        console=console,
        expand=True,
    ) as bars:
        yield LiveDisplay(bars)


class LiveDisplay:
    """A bar for each phase."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = None if not bars.tasks else bars.tasks[-1].id

    def phase(self, name: str, detail: str = "") -> None:
        """Complete the bar of the previous phase and start one."""
        if self._task is not None:
            self._bars.update(self._task, total=1.0, completed=1.0)
            self._bars.stop_task(self._task)
        self._task = self._bars.add_task(name, total=None, line=detail)

    def progress(self, fraction: float | None, line: Line) -> None:
        """Move the bar; it pulses while the fraction is unknown."""
        if self._task is None:
            return
        total = None if fraction is None else 1.0
        done = min(fraction or 0.0, 1.0)
        self._bars.update(self._task, total=total, completed=done, line=spell(line))

    def message(self, text: str) -> None:
        """Print a text above the bars."""
        self._bars.console.print(text, markup=False, highlight=False)


class PlainDisplay:
    """A line for each phase, and one every few seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = clock()
        self._shown = self._began
        self._last: str | None = None

    def phase(self, name: str, detail: str = "") -> None:
        """Print the last line of the previous phase, and the start of a new one."""
        self.flush()
        self._print(f"{name}: {detail}" if detail else name)

    def progress(self, fraction: float | None, line: Line) -> None:
        """Print a line if the previous one is old enough."""
        share = "" if fraction is None else f"{min(fraction, 1.0):4.0%}  "
        self._last = f"  {share}{spell(line)}"
        if self._clock() - self._shown >= PLAIN_EVERY_S:
            self.flush()

    def message(self, text: str) -> None:
        """Print a text."""
        self.flush()
        self._print(text)

    def flush(self) -> None:
        """Print the line that was held back."""
        if self._last is not None:
            self._print(self._last)
        self._last = None
        self._shown = self._clock()

    def _print(self, text: str) -> None:
        passed = self._clock() - self._began
        line = f"[{passed:6.1f} s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def spell(line: Line) -> str:
    """Return ``name value`` pairs, numbers with three or four digits."""
    return "  ".join(f"{name} {number(value)}" for name, value in line.items())


def number(value: float | str) -> str:
    """Return a figure as text."""
    if isinstance(value, str):
        return value
    if value != value:
        return "-"
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e9):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def report_table(report: Mapping[str, object]) -> Group:
    """Return the results of a run, from ``RunReport.as_dict()``."""
    count = report.get("tasks_after") or report.get("tasks_before")
    title = f"Held-out tasks ({count} different)" if count else "Held-out tasks"
    held_out = titled(title, "", "before", "after")
    for label, pick in _ESTIMATES.items():
        cells = [pick(report, when) for when in ("before", "after")]
        if any(cells):
            held_out.add_row(label, *(interval(c, label) for c in cells))
    if len(_envs(report)) < 2:
        _add_rewards(held_out, report, "sampled")
    for name, of_it in _envs(report):
        cells = [of_it.get(f"success_{when}") for when in ("before", "after")]
        if any(cells):
            held_out.add_row(f"success, {name}", *(interval(c, "success") for c in cells))
        _add_rewards(held_out, of_it, name)
    facts = two_columns()
    for name, value in _facts(report):
        facts.add_row(name, value)
    tables = [table for table in (held_out, *_env_tables(report)) if table.row_count]
    return Group(*tables, facts)


def _add_rewards(held_out: RichTable, report: Mapping[str, object], which: str) -> None:
    """Add the reward and each of its components, except those that other rows show."""
    both = [mapping(report.get(f"rewards_{when}")) for when in ("before", "after")]
    names = dict.fromkeys(name for one in both for name in one)
    for name in [one for one in names if one not in ("success", "score")]:
        held_out.add_row(f"{name}, {which}", *(interval(one.get(name), name) for one in both))


def two_columns() -> RichTable:
    """Return an empty table of labels and values."""
    return RichTable(show_header=False, box=None, padding=(0, 2, 0, 0))


def titled(title: str, *columns: str) -> RichTable:
    """Return an empty table with a title."""
    return RichTable(*columns, title=title, title_justify="left", title_style="bold")


def _env_tables(report: Mapping[str, object]) -> Iterator[RichTable]:
    """Yield the results of several environments, and why each ran where it did."""
    titles = ("", "trained", "finished", "success", "score", "failed", "envs on", "engines")
    done = titled("Environments, while training", *titles)
    why = two_columns()
    for name, of_it in _envs(report):
        counts = [f"{as_float(of_it.get(key)):,.0f}" for key in ("trained", "finished")]
        rollout, ran = mapping(of_it.get("rollout")), mapping(of_it.get("ran"))
        means = [number(as_float(rollout.get(key))) for key in ("success", "score")]
        failed = ", ".join(f"{k} {v}" for k, v in mapping(of_it.get("failures")).items())
        where = [str(ran.get("envs_on", "")), _generated(mapping(ran.get("engines")))]
        done.add_row(name, *counts, *means, failed or "none", *where)
    reasons = {name: [str(one) for one in _list(of_it.get("why"))] for name, of_it in _envs(report)}
    times = Counter(reason for own in reasons.values() for reason in own)
    for name, own in reasons.items():
        for reason in own:
            if times[reason] < len(reasons):
                why.add_row(f"why {name}", reason)
    for reason, count in times.items():
        if count == len(reasons):
            why.add_row("why", reason)
    yield done
    yield why


def _generated(engines: Mapping[str, object]) -> str:
    """Return the share of each engine in an environment's conversations, largest first."""
    counts = {name: as_float(mapping(one).get("conversations")) for name, one in engines.items()}
    total = sum(counts.values()) or 1.0
    most = sorted(counts, key=lambda name: -counts[name])
    return ", ".join(f"{counts[name] / total:.0%} {name}" for name in most)


def _envs(report: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    """Return the report of each environment if there are several."""
    envs = mapping(report.get("envs"))
    return [(name, mapping(of_it)) for name, of_it in envs.items() if len(envs) > 1]


def _sampled(what: str) -> Callable[[Mapping[str, object], str], object]:
    return lambda report, when: report.get(f"{what}_{when}")


def _greedy(what: str) -> Callable[[Mapping[str, object], str], object]:
    return lambda report, when: mapping(report.get(f"greedy_{when}")).get(what)


_ESTIMATES: Mapping[str, Callable[[Mapping[str, object], str], object]] = {
    "success, sampled": _sampled("success"),
    "success, greedy": _greedy("success"),
    "score, sampled": _sampled("score"),
    "score, greedy": _greedy("score"),
}


def interval(estimate: object, label: str) -> str:
    """Return ``mean [low, high] of n in c clusters``, with the 95% interval if it is known."""
    values = mapping(estimate)
    if not values.get("n"):
        return "not measured"
    form = ".1%" if label.startswith("success") else ".3f"
    mean, count = as_float(values.get("mean")), as_float(values.get("n"))
    clusters = as_float(values.get("num_clusters"))
    within = f" in {clusters:.0f} clusters" if 0 < clusters < count else ""
    return f"{mean:{form}}{_bracket(values, form)} of {count:.0f}{within}"


def _bracket(estimate: Mapping[str, object], form: str) -> str:
    """Return `` [low, high]``; empty if a bound is unknown, as for a mean over one task."""
    low, high = (as_float(estimate.get(k)) for k in ("low", "high"))
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f" [{low:{form}}, {high:{form}}]"


def _facts(report: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    gain = mapping(report.get("score_gain"))
    if gain:
        bracket = _bracket(gain, "+.3f")
        yield "score gained", f"{as_float(gain.get('mean')):+.3f}{bracket and f'{bracket} (95%)'}"
    if choice := report.get("choice"):
        best, last = (mapping(report.get(which)) for which in ("best", "last"))
        yield "best validation", _validated(best)
        yield "last validation", _validated(last)
        yield "trained model", str(choice)
    yield "train steps", _updates(report)
    total_s, train_s = as_float(report.get("wall_s")), as_float(report.get("train_wall_s"))
    yield "time", f"{total_s:,.1f} s, including {train_s:,.1f} s of RL"
    yield "tokens/s", _throughput(report)
    if step := mapping(report.get("step_s")):
        yield "time per batch", _step(step)
    yield "staleness", _histogram(mapping(report.get("staleness")))
    failures = mapping(report.get("failures"))
    yield "failures", ", ".join(f"{k} {v}" for k, v in failures.items()) or "none"
    yield "ended", str(report.get("stop_reason", ""))
    yield "run directory", str(report.get("run_dir"))
    if not report.get("ok", True) or as_float(gain.get("high")) < 0:
        yield "why", f"run `rollart diagnose {report.get('run_dir')}`"


def _validated(point: Mapping[str, object]) -> str:
    """Return metric, value and version of a validation."""
    metric = str(point.get("metric", ""))
    form = ".1%" if metric.endswith("success") else ".3f"
    value = f"{as_float(point.get('value')):{form}}{_bracket(point, form)}"
    return f"{metric} {value} at version {point.get('policy_version')}" if point else "none"


def _updates(report: Mapping[str, object]) -> str:
    skipped = report.get("skipped_updates")
    text = f"{as_float(report.get('train_steps')):,.0f}"
    text += f", {as_float(skipped):,.0f} skipped" if skipped else ""
    return text if report.get("has_signal", True) else f"{text}; no reward differed within a group"


def _throughput(report: Mapping[str, object]) -> str:
    text = f"{as_float(report.get('tokens_per_s')):,.0f}"
    known = {name: report.get(f"{name}_tokens_per_s") for name in ("generated", "trained")}
    parts = [f"{as_float(n):,.0f} {name}" for name, n in known.items() if n is not None]
    return f"{text} ({', '.join(parts)})" if parts else text


def _step(seconds: Mapping[str, object]) -> str:
    """Return the seconds of a batch, with its phases and their shares."""
    total = sum(map(as_float, seconds.values()))
    parts = [f"{name} {as_float(s) / total:.0%}" for name, s in seconds.items()]
    return f"{total:,.2f} s: {', '.join(parts)}"


def _histogram(counts: Mapping[str, object]) -> str:
    """Return one line per staleness: versions, share as a bar, samples."""
    if not counts:
        return "no sample trained"
    most = max(as_float(n) for n in counts.values()) or 1.0
    lines = []
    for versions, n in sorted(counts.items(), key=lambda item: int(item[0])):
        bar = "█" * max(1, round(_BAR_WIDTH * as_float(n) / most))
        lines.append(f"{versions:>2} versions {bar} {as_float(n):,.0f} samples")
    return "\n".join(lines)


def mapping(value: object) -> Mapping[str, object]:
    """Return a mapping of a report; empty if it is something else."""
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else []


def as_float(value: object) -> float:
    """Return a number of a report; NaN if it is something else."""
    return float(value) if isinstance(value, int | float) else float("nan")
