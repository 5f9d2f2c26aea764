"""The table of environments and players, from one or several reports.

Takes: the ``report.json`` of evaluations and training runs. Gives: a :class:`Table`, and Markdown.
Never: puts two results in one cell, or hides that two columns have different tasks or options.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart_core.config.load import read_yaml
from rollart_core.errors import ConfigError

MODEL, TRAINED = "model", "trained"
_FIRST = ("oracle", "noop", "random")
_TITLES = {"noop": "no-op"}
_SAME = ("split", "options", "max_turns", "seed", "task_seeds")
"""Facts of an environment that must be equal in two columns. Otherwise the table has a note."""
Json = Mapping[str, Any]


@dataclass(slots=True)
class Table:
    """A table with a row per environment and a column per player."""

    envs: dict[str, Json] = field(default_factory=dict)
    """Name of the environment -> its facts."""
    cells: dict[tuple[str, str], Json] = field(default_factory=dict)
    """(environment, column) -> the results."""
    notes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """The players, baselines first."""
        names = list(dict.fromkeys(column for _, column in self.cells))
        return [*(n for n in _FIRST if n in names), *(n for n in names if n not in _FIRST)]

    def as_dict(self) -> dict[str, object]:
        """Return the table as plain JSON."""
        return {
            "columns": self.columns,
            "envs": list(self.envs.values()),
            "cells": [
                {**cell, "env": env, "column": column} for (env, column), cell in self.cells.items()
            ],
            "notes": self.notes,
        }

    def add(self, other: Table, source: str) -> None:
        """Add the columns of another report.

        Raises:
            ConfigError: If a cell is already in the table.
        """
        rows = {name: _row_of(name, self.envs, other.envs) for name in other.envs}
        for name, facts in other.envs.items():
            self.envs.setdefault(rows[name], facts)
        for (env, column), cell in other.cells.items():
            place = (rows.get(env, env), column)
            if place in self.cells:
                mend = f"use another label: --with LABEL={source}"
                if column in _FIRST:  # a label is for the model's column
                    mend = "remove one of the two"
                raise ConfigError(
                    f"--with {source}: the table has a column {column!r} for {place[0]} already; "
                    f"{mend}"
                )
            self.cells[place] = cell
        for env, facts in other.envs.items():
            self._compare(rows[env], facts, source)
        self.notes += other.notes

    def _compare(self, row: str, facts: Json, source: str) -> None:
        own = self.envs[row]
        if own is facts:
            return
        other = [key for key in _SAME if key in own and key in facts and own[key] != facts[key]]
        if other:
            said = ", ".join(_difference(key, own[key], facts[key]) for key in other)
            self.notes.append(f"`{row}`: {Path(source).name} has other tasks: {said}")


def _row_of(name: str, mine: Mapping[str, Json], theirs: Mapping[str, Json]) -> str:
    """Return the row of an environment: the one with its name, or the only one with its id."""
    if name in mine:
        return name
    its_id = theirs[name].get("id")
    same, alike = ([n for n, f in envs.items() if f.get("id") == its_id] for envs in (mine, theirs))
    return same[0] if len(same) == len(alike) == 1 else name


def merged(table: Table, others: Sequence[tuple[str, Table]]) -> Table:
    """Return a table with the columns of other tables, each with its source on the command line.

    Raises:
        ConfigError: If two tables have the same cell.
    """
    for given, other in others:
        table.add(other, str(_parted(given)[1]))
    return table


def of_report(report: Json, label: str | None = None) -> Table:
    """Return the table of an evaluation's report.

    Args:
        report: The content of ``report.json``.
        label: Name of the model's column.
    """
    table = Table()
    table.envs = {facts["name"]: facts for facts in report["card"]["envs"]}
    for cell in report["cells"]:
        column = label if label and cell["column"] == MODEL else cell["column"]
        if label and cell["column"] == "greedy":
            column = f"{label}, greedy"
        table.cells[cell["env"], column] = cell
    for name in report["card"]["left_out"]:
        table.envs.setdefault(name, {"name": name, "id": name})
    return table


def read_table(given: str) -> Table:
    """Return the columns of ``[LABEL=]DIR``: an evaluation, or a training run's held-out tasks.

    Raises:
        ConfigError: If there is no report, or it has no results on held-out tasks.
    """
    label, folder = _parted(given)
    path = folder / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        message = f"--with {given}: {folder} has no report.json: has it finished?"
        raise ConfigError(message) from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"--with {given}: {path} cannot be read: {e}") from None
    if isinstance(report, dict) and report.get("kind") == "evaluation":
        return of_report(report, label)
    if not isinstance(report, dict) or not report.get("success_after"):
        raise ConfigError(f"--with {given}: {path} has no results on held-out tasks after training")
    return _of_training(report, folder, label or TRAINED)


def _parted(given: str) -> tuple[str | None, Path]:
    """Return label and folder. A folder name may contain ``=``."""
    label, separator, rest = given.partition("=")
    if not separator or Path(given).is_dir():
        return None, Path(given)
    return label, Path(rest)


def _of_training(report: Json, folder: Path, label: str) -> Table:
    config = read_yaml(folder / "config.yaml")
    entries = config["env"] if isinstance(config["env"], list) else [config["env"]]
    table = Table()
    for entry in entries:
        name = entry.get("name") or entry["id"]
        own = report if len(entries) == 1 else report["envs"].get(name, {})
        if not own.get("success_after"):
            continue
        table.envs[name] = _facts(config, entry, name)
        samples = config["evaluation"].get("samples_per_task", 1)
        table.cells[name, label] = _trained_cell(own, name, label, samples)
    return table


def _facts(config: Json, entry: Json, name: str) -> Json:
    run = entry.get("run") or {}
    options = {k: v for k, v in entry.items() if k not in ("id", "name", "weight", "run")}
    split = run.get("evaluation_split") or config["evaluation"]["split"]
    turns = run.get("max_turns") or config["rollout"].get("max_turns")
    facts = {"name": name, "id": entry["id"], "split": split, "options": options}
    return facts | {"seed": config.get("seed", 0)} | ({"max_turns": turns} if turns else {})


def _trained_cell(report: Json, name: str, label: str, samples: int) -> Json:
    success, score = report["success_after"], report.get("score_after")
    num_episodes = (score or success)["n"]
    return {
        "env": name,
        "column": label,
        "tasks": math.ceil(num_episodes / samples),
        "attempts_per_task": samples,
        "success": success,
        "score": score,
        "pass_at": {},
        "episodes": num_episodes,
        "failed": None,
        "failures": {},
        "why": "",
    }


def markdown(table: Table) -> str:
    """Return the table as Markdown, followed by the reasons for missing results."""
    head = titles(table)
    lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows(table))]
    said = notes(table)
    return "\n".join([*lines, *(["", *(f"- {note}" for note in said)] if said else [])])


def shown_success(cell: Json) -> str:
    """Return a cell's success, or its score if the environment does not report success."""
    success, score = cell.get("success"), cell.get("score")
    if success and success["n"]:
        mean, low, high = (100 * success[k] for k in ("mean", "low", "high"))
        return f"{mean:.1f}% [{low:.1f}, {high:.1f}]"
    return f"score {shown_score(score)}" if score and score["n"] else "-"


def shown_score(score: Json | None) -> str:
    """Return a score with its interval."""
    if not score or not score["n"] or score["mean"] is None:
        return "-"
    if score["low"] is None or score["high"] is None:
        return f"{score['mean']:.3f}"
    return f"{score['mean']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def titles(table: Table) -> list[str]:
    """Return the titles of the columns."""
    return ["environment", "tasks", *(_TITLES.get(c, c) for c in table.columns)]


def rows(table: Table) -> Iterable[list[str]]:
    """Yield a row per environment: its name, its tasks, the result of each player."""
    for env in table.envs:
        of_it = [table.cells.get((env, column), {}) for column in table.columns]
        counts = sorted({str(c["tasks"]) for c in of_it if c.get("tasks")}, key=int)
        yield [f"`{env}`", " / ".join(counts) or "-", *map(shown_success, of_it)]


def notes(table: Table) -> list[str]:
    """Return the notes below the table: reasons for missing results, and the table's notes."""
    whys: dict[tuple[str, str], list[str]] = {}
    for (env, column), cell in table.cells.items():
        if cell.get("why"):
            whys.setdefault((env, cell["why"]), []).append(_TITLES.get(column, column))
    return [
        *(f"`{env}`, {', '.join(who)}: {why}" for (env, why), who in whys.items()),
        *table.notes,
    ]


def _difference(key: str, own: Any, other: Any) -> str:
    if isinstance(own, dict) and isinstance(other, dict):
        names = [n for n in {**own, **other} if own.get(n) != other.get(n)]
        return ", ".join(f"{n} {other.get(n)} instead of {own.get(n)}" for n in names)
    return f"{key} {other} instead of {own}"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
