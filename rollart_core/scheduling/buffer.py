"""The buffer of finished trajectories, by group, until the group is trained or dropped.

Takes: trajectories that did not fail. Gives: whole groups, in canonical order. Never: decides what
is trained. The scheduler decides that, and its admission bound determines the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart_core.types import Group, Trajectory


class Buffer:
    """A bounded store of complete and incomplete groups."""

    def __init__(self, group_size: int, capacity: int) -> None:
        """Create an empty buffer.

        Args:
            group_size: The planned number of members of a group.
            capacity: The maximum number of trajectories. ``(max_staleness + 1) * groups_per_batch *
                group_size`` holds everything that the scheduler admits.
        """
        self._group_size = group_size
        self._capacity = capacity
        self._growing: dict[str, dict[int, Trajectory]] = {}
        self._complete: dict[str, Group] = {}
        self._num_trajectories = 0

    def __len__(self) -> int:
        """Return the number of stored trajectories."""
        return self._num_trajectories

    def add(self, trajectory: Trajectory) -> None:
        """Store a trajectory until its group is taken or discarded."""
        ticket = trajectory.ticket
        assert trajectory.failure is None, f"{ticket.ticket_id}: a failed trajectory in the buffer"
        assert ticket.group_id not in self._complete, f"{ticket.ticket_id}: its group is complete"
        members = self._growing.setdefault(ticket.group_id, {})
        assert ticket.index not in members, f"{ticket.ticket_id}: two trajectories of one ticket"
        members[ticket.index] = trajectory
        self._num_trajectories += 1
        assert self._num_trajectories <= self._capacity, f"above capacity {self._capacity}"

    def complete(self, group_id: str, lost: Sequence[int] = ()) -> Group:
        """Close a group and return it, members in the order of their index.

        Args:
            group_id: The group.
            lost: The members that the scheduler gave up. If a ticket expires just as its episode
                finishes, the buffer holds such a member; it is left out.
        """
        members = self._growing.pop(group_id)
        self._release(sum(members.pop(i, None) is not None for i in lost))
        ordered = tuple(members[i] for i in sorted(members))
        group = Group(group_id, ordered[0].ticket.task, ordered, self._group_size)
        self._complete[group_id] = group
        return group

    def take(self, group_ids: Sequence[str]) -> list[Group]:
        """Remove complete groups and return them, ordered by group id."""
        groups = [self._complete.pop(g) for g in sorted(group_ids)]
        for group in groups:
            self._release(len(group.trajectories))
        return groups

    def discard(self, group_id: str) -> None:
        """Remove a group, complete or not. An unknown group is ignored."""
        if group := self._complete.pop(group_id, None):
            self._release(len(group.trajectories))
        if members := self._growing.pop(group_id, None):
            self._release(len(members))

    def _release(self, num_trajectories: int) -> None:
        self._num_trajectories -= num_trajectories
        assert self._num_trajectories >= 0
