"""Groups are held whole, in canonical order, and no more of them than were admitted."""

import numpy as np
import pytest

from rollart_core.scheduling.buffer import Buffer
from rollart_core.types import Failure, FailureKind, Sample, Task, Ticket, Trajectory

TASK = Task("fake/Env-v0", "train", 3, 7)


def trajectory(group: str, index: int, num_tokens: int = 5) -> Trajectory:
    sample = Sample(
        np.arange(num_tokens, dtype=np.int32),
        np.ones(num_tokens, np.bool_),
        np.zeros(num_tokens, np.float32),
        np.zeros(num_tokens, np.int32),
        np.zeros(num_tokens, np.int32),
    )
    ticket = Ticket(f"{group}.{index}", TASK, group, index)
    return Trajectory(ticket, "finished", (sample,), reward=1.0)


def test_members_and_groups_come_out_in_canonical_order() -> None:
    buffer = Buffer(3, 12)
    for group, index in [("g2", 1), ("g1", 2), ("g2", 0), ("g1", 0)]:
        buffer.add(trajectory(group, index))
    whole = buffer.complete("g2")
    assert [t.ticket.index for t in whole.trajectories] == [0, 1]
    assert whole.num_dispatched == 3
    buffer.complete("g1")
    assert [g.group_id for g in buffer.take(["g2", "g1"])] == ["g1", "g2"]
    assert len(buffer) == 0


def test_discard_frees_both_kinds() -> None:
    buffer = Buffer(2, 4)
    for group in ("g1", "g2"):
        buffer.add(trajectory(group, 0))
    assert len(buffer) == 2
    buffer.complete("g1")
    buffer.discard("g1")
    assert len(buffer) == 1
    buffer.discard("g2")
    buffer.discard("never seen")
    assert len(buffer) == 0


def test_a_member_that_was_given_up_is_left_out() -> None:
    buffer = Buffer(3, 3)
    for index in range(2):
        buffer.add(trajectory("g1", index))
    whole = buffer.complete("g1", lost=(0, 2))
    assert [t.ticket.index for t in whole.trajectories] == [1]
    assert len(buffer) == 1


def test_what_may_never_happen_is_caught() -> None:
    buffer = Buffer(2, 2)
    buffer.add(trajectory("g1", 0))
    with pytest.raises(AssertionError, match="two trajectories"):
        buffer.add(trajectory("g1", 0))
    failure = Failure(FailureKind.TIMEOUT, "env.step", "slow")
    failed = Trajectory(Ticket("g1.1", TASK, "g1", 1), "failed", failure=failure)
    with pytest.raises(AssertionError, match="failed trajectory"):
        buffer.add(failed)
    buffer.complete("g1")
    with pytest.raises(AssertionError, match="group is complete"):
        buffer.add(trajectory("g1", 1))
    buffer.add(trajectory("g2", 0))
    with pytest.raises(AssertionError, match="capacity"):
        buffer.add(trajectory("g2", 1))


def test_a_growing_group_cannot_be_taken() -> None:
    buffer = Buffer(2, 2)
    buffer.add(trajectory("g1", 0))
    with pytest.raises(KeyError):
        buffer.take(["g1"])
