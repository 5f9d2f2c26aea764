#!/usr/bin/env python3
"""Audit the journal of a run with only SQLite; this script shares no code with RollArt.

    scripts/audit_journal.py runs/webshop-20260101-120000

Reads ``journal.db`` and checks the guarantees of a run. Each ticket is trained at most once, on a
finished attempt, in the incarnation (``life``) of the run that trained it, and within the staleness
bound. All valid batches and metrics are in order. A run that has ended has no open ticket. An
infrastructure loss is counted once. Prints one JSON object. The exit code is 1 if a guarantee is
broken, and 2 if there is no journal.
"""

import json
import sqlite3
import sys
from collections import Counter
from itertools import pairwise
from math import isfinite
from pathlib import Path

OPEN_STATES = {"queued", "running", "finished", "failed", "training"}
ENDED_WITH = "StopRun"
BEGAN_AGAIN = "rolled_back"
MAX_SHOWN = 20


def audit(path):
    """Return the contents of a journal, and the broken guarantees.

    Args:
        path: The path of ``journal.db``.
    """
    journal = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    journal.row_factory = sqlite3.Row
    try:
        journal.execute("BEGIN")  # one transaction, so that all tables are consistent
        tables = {
            name: journal.execute(f"SELECT * FROM {name} ORDER BY rowid").fetchall()
            if name not in ("tickets", "meta")
            else journal.execute(f"SELECT * FROM {name}").fetchall()
            for name in ("meta", "tickets", "events", "batches", "trajectories")
        }
    finally:
        journal.close()
    tickets = {row["ticket_id"]: row for row in tables["tickets"]}
    events, rows = tables["events"], tables["trajectories"]
    live = [row for row in tables["batches"] if row["state"] != "rolled_back"]
    config = json.loads({row["key"]: row["value"] for row in tables["meta"]}["config"])
    bound = 0 if config.get("mode") == "sync" else config.get("max_staleness", 0)
    trained, broken = trained_once(live, rows, bound)
    broken += in_order(live)
    broken += settled(tickets, events, trained)
    broken += attempts_recorded(events, rows)
    broken += losses_counted(events, rows)
    kinds = Counter(row["failure_kind"] for row in rows if row["failure_kind"])
    return {
        "journal": str(path),
        "tickets": dict(Counter(row["state"] for row in tickets.values())),
        "batches": len(live),
        "batches_rolled_back": len(tables["batches"]) - len(live),
        "trained": len(trained),
        "attempts": sum(event["kind"] == "dispatched" for event in events),
        "failures": dict(kinds),
        "losses": dict(Counter(losses(events))),
        "broken": broken[:MAX_SHOWN],
        "num_broken": len(broken),
    }


def trained_once(live, rows, bound):
    """Return the tickets of the valid batches, and their broken guarantees."""
    broken, trained = [], Counter()
    recorded = {}
    for row in rows:
        recorded.setdefault((row["ticket_id"], row["attempt"]), []).append(row)
    for batch in live:
        ticket_ids, attempts = json.loads(batch["ticket_ids"]), json.loads(batch["attempts"])
        for ticket_id, attempt in zip(ticket_ids, attempts, strict=True):
            where = f"batch {batch['batch']}: {ticket_id}#{attempt}"
            trained[ticket_id] += 1
            found = recorded.get((ticket_id, attempt), [])
            good = [row for row in found if row["failure_kind"] is None]
            if len(good) != 1 or len(found) != 1:
                broken.append(f"{where} has {len(good)} finished records of {len(found)}")
                continue
            (row,) = good
            if row["reward"] is None or not isfinite(row["reward"]):
                broken.append(f"{where} has the reward {row['reward']}")
            if row["life"] != batch["life"]:
                broken.append(f"{where} is from life {row['life']}, its batch from {batch['life']}")
            if not 0 <= batch["batch"] - row["oldest_version"] <= bound:
                broken.append(f"{where} has version {row['oldest_version']}, bound {bound}")
            if row["group_id"] not in json.loads(batch["group_ids"]):
                broken.append(f"{where} is from group {row['group_id']}, which is not in it")
    broken += [f"{name} is trained {n} times" for name, n in trained.items() if n > 1]
    return trained, broken


def in_order(live):
    """Return where the numbers of the valid batches do not increase."""
    numbers = [batch["batch"] for batch in live]
    return [
        f"batch {after} follows {before}" for before, after in pairwise(numbers) if after <= before
    ]


def settled(tickets, events, trained):
    """Return tickets whose state differs from batches and events."""
    broken = []
    known = {event["ticket_id"] for event in events if event["kind"] == "dispatched"}
    broken += [f"{name} was dispatched and is unknown" for name in known - tickets.keys()]
    for name, row in tickets.items():
        if (row["state"] == "trained") != (name in trained) and row["state"] != "training":
            broken.append(f"{name} is {row['state']}, and in {trained[name]} batches")
    last = [e["kind"] for e in events if e["kind"] in (ENDED_WITH, BEGAN_AGAIN, "dispatched")]
    if last and last[-1] == ENDED_WITH:
        open_now = [name for name, row in tickets.items() if row["state"] in OPEN_STATES]
        broken += [f"{name} is {tickets[name]['state']} after the end" for name in open_now]
    return broken


def attempts_recorded(events, rows):
    """Return attempts that were dispatched twice in a life, or recorded but never dispatched."""
    dispatched = {
        (event["ticket_id"], event["attempt"]) for event in events if event["kind"] == "dispatched"
    }
    recorded = {(row["ticket_id"], row["attempt"]) for row in rows}
    twice = Counter((row["ticket_id"], row["attempt"], row["life"]) for row in rows)
    return [
        *(f"{name}#{n} is recorded but was never dispatched" for name, n in recorded - dispatched),
        *(f"{key[0]}#{key[1]} is recorded {n} times" for key, n in twice.items() if n > 1),
    ]


def losses(events):
    """Yield the kind of worker of each loss."""
    for event in events:
        if event["kind"] == "part_died":
            yield json.loads(event["payload"]).get("part", "").partition("-")[0]
        elif event["kind"] == "trainer_lost":
            yield "trainer"


def losses_counted(events, rows):
    """Return the mismatch between lost env workers and counted infrastructure failures."""
    counted = sum(row["failure_kind"] == "infrastructure" for row in rows)
    lost = Counter(losses(events))["env"]
    if counted > lost:
        return [f"{counted} failures are infrastructure, but {lost} env workers were lost"]
    return []


def main(arguments):
    """Audit one run directory."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(arguments[0])
    path = path / "journal.db" if path.is_dir() else path
    if not path.is_file():
        print(f"Error: there is no journal at {path}", file=sys.stderr)
        return 2
    try:
        found = audit(path)
    except (sqlite3.Error, KeyError, ValueError) as e:
        print(f"Error: {path} cannot be audited: {e}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2))
    return 1 if found["num_broken"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
