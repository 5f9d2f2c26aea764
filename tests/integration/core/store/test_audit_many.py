"""The audit of a large journal."""

import sqlite3
from pathlib import Path

from rollart_core.store.audit import audit
from rollart_core.store.journal import Journal


def test_a_hundred_thousand_tickets_take_seconds(tmp_path: Path) -> None:
    Journal(tmp_path, {"mode": "async", "max_staleness": 1}).close()
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.execute(
            "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 99999)"
            " INSERT INTO tickets SELECT printf('g%07d.%d', i / 8, i % 8), printf('g%07d', i / 8),"
            " i % 8, '[]', 'dropped', 0, 0, NULL, 'filtered', 0, 0 FROM n"
        )
        db.execute(
            "INSERT INTO trajectories SELECT rowid, 0, ticket_id, 0, group_id, 'finished', 1, 1, 1,"
            " 50, 20, 3, 0, 0, 1, NULL, NULL, NULL, NULL, NULL, 0 FROM tickets"
        )
    db.close()
    # About 2 s; where it looked for each among all, the test's timeout would end it.
    report = audit(tmp_path)
    assert (report.num_tickets, report.ok) == (100_000, True)
