"""Journals of runs, written by hand for tests of the audit."""

from pathlib import Path

import numpy as np

from rollart_core.scheduling.events import StopRun
from rollart_core.store.audit import audit
from rollart_core.store.journal import Journal
from rollart_core.types import Failure, FailureKind, Group, Sample, Task, Ticket, Trajectory, Turn

TASK = Task("fake/Env-v0", "train", 3, 7)
TURN = Turn("see", "do", 3, 3, "stop", 0.0, 0.0, 0.0)
END = StopRun("done", "done")


def ticket(group: int, index: int = 0, attempt: int = 0) -> Ticket:
    group_id = f"g{group:07d}"
    return Ticket(f"{group_id}.{index}", TASK, group_id, index, attempt)


def finished(t: Ticket, version: int = 0, num_tokens: int = 6, num_turns: int = 1) -> Trajectory:
    row = np.full(num_tokens, version, np.int32)
    sample = Sample(row, np.ones(num_tokens, np.bool_), row.astype(np.float32), row, row)
    return Trajectory(t, "finished", (sample,), (TURN,) * num_turns, 0.5, 1.0, True)


def failed(t: Ticket) -> Trajectory:
    return Trajectory(t, "failed", failure=Failure(FailureKind.SANDBOX, "sandbox.exec", "gone"))


class Run:
    """A journal with short words for what happens."""

    def __init__(self, run_dir: Path, mode: str = "async") -> None:
        self.run_dir = run_dir
        self.journal = Journal(run_dir, {"mode": mode, "max_staleness": 1})

    def finish(self, t: Ticket, version: int = 0, **kwargs: int) -> Trajectory:
        self.journal.dispatched(t, version)
        self.journal.trajectory(finished(t, version, **kwargs))
        return finished(t, version, **kwargs)

    def train(self, batch: int, *trajectories: Trajectory) -> None:
        group_id = trajectories[0].ticket.group_id
        group = Group(group_id, TASK, trajectories, len(trajectories))
        self.journal.batch_taken([group], batch)
        self.journal.batch_trained(batch)

    def audit(self):
        self.journal.flush()
        return audit(self.run_dir)
