"""Output of commands: tables for people, one JSON object for scripts.

Takes: plain data. Gives: text on stdout. Never: mixes the two, or wraps or cuts a line if stdout is
not a terminal.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rollart_core import strict_json

if TYPE_CHECKING:
    from rich.console import Console

_UNLIMITED: Final = 10**6
"""The width of lines if stdout is not a terminal, in columns."""
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Return external text without characters that move a terminal's cursor or hide lines."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def print_json(value: object) -> None:
    """Print one JSON object. NaN and infinities, which JSON lacks, become null."""
    print(strict_json.dumps(value))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=visible(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(visible, row))
    stdout_console().print(table)


def print_columns(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a long list in columns, with the last one wrapped to the terminal's width.

    Rich would need longer to draw a hundred lines than it takes to collect them.
    """
    lines = [tuple(columns), *(tuple(map(visible, row)) for row in rows)]
    title = visible(title)
    *widths, _ = (max(len(line[n]) for line in lines) for n in range(len(columns)))
    indent = sum(widths) + 2 * len(widths) + 1
    width = shutil.get_terminal_size((_UNLIMITED, 0)).columns
    num_columns = max(20, width - indent) if sys.stdout.isatty() else _UNLIMITED
    print(f"\033[1m{title}\033[0m" if sys.stdout.isatty() else title)
    for line in lines:
        start = "".join(f"{cell:{n}}  " for cell, n in zip(line[:-1], widths, strict=True))
        last = textwrap.wrap(line[-1], num_columns) or [""]
        print("\n".join([f" {start}{last[0]}", *(" " * indent + more for more in last[1:])]))
    print()


def plain(value: object) -> str:
    """Return a value as text for people: without brackets, and empty for None."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def stdout_console() -> Console:
    """Return a console that prints text unchanged (no markup).

    If stdout is not a terminal, each row of a table is one line, whatever ``COLUMNS`` says.
    """
    from rich.console import Console

    live = sys.stdout.isatty()
    width = None if live else _UNLIMITED
    return Console(markup=False, highlight=False, soft_wrap=not live, width=width)
