"""What commands print: tables for people, one JSON object for scripts.

Takes: plain data. Gives: text on stdout. Never: mixes the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_json(value: object) -> None:
    """Print one JSON object; NaN and infinities, which JSON does not have, become null."""
    typer.echo(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table)


def plain(value: object) -> str:
    """Return a value as a person reads it: no brackets, nothing for None."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def stdout_console() -> Console:
    """Return a console that takes texts as they are (no markup)."""
    return Console(markup=False, highlight=False, soft_wrap=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
