"""The tests that are known to be flaky: tests/flaky.md, a table with a row for each.

Takes: the repository's root. Gives: the rows, and those that have expired: a cause has to be found
and mended within ``DAYS`` days.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

DAYS = 14


@dataclass(frozen=True)
class Entry:
    """A row: the test's id, the day it was first seen to be flaky, and the cause."""

    test: str
    since: datetime.date
    cause: str


def read_entries(root: Path) -> list[Entry]:
    """Return the rows of the table.

    Raises:
        ValueError: If a row has no cause, or its date is none.
    """
    rows = []
    for number, line in enumerate((root / "tests/flaky.md").read_text("utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("| `"):
            continue
        if len(cells) != 3 or not cells[2]:
            raise ValueError(f"tests/flaky.md:{number}: a row is | `test` | YYYY-MM-DD | cause |")
        rows.append(Entry(cells[0].strip("`"), datetime.date.fromisoformat(cells[1]), cells[2]))
    return rows


def expired(root: Path, today: datetime.date | None = None) -> list[Entry]:
    """Return the rows that are older than ``DAYS`` days."""
    day = today or datetime.date.today()
    return [one for one in read_entries(root) if (day - one.since).days > DAYS]
