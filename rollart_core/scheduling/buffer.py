"""Finished trajectories, held by group until their group is trained or dropped.

Takes: trajectories that did not fail. Gives: whole groups, in canonical order. Never: decides what
is trained; the scheduler does, and the capacity follows from its admission bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart_core.types import Group, Trajectory


class Buffer:
    """A bounded store of whole and growing groups."""

    def __init__(self, group_size: int, capacity: int) -> None:
        """Start empty.

        Args:
            group_size: Members a group is meant to have.
            capacity: Most trajectories at once: ``(max_staleness + 1) * groups_per_batch *
                group_size`` holds all that the scheduler admits.
        """
        self._group_size = group_size
        self._capacity = capacity
        self._growing: dict[str, dict[int, Trajectory]] = {}
        self._complete: dict[str, Group] = {}
        self._num_trajectories = 0

    def __len__(self) -> int:
        """Return how many trajectories it holds."""
        return self._num_trajectories

    def add(self, trajectory: Trajectory) -> None:
        """Hold a trajectory until its group is taken or discarded."""
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
            lost: Members the scheduler gave up. One may be here all the same, when its ticket
                expired just as it finished; it is left out.
        """
        members = self._growing.pop(group_id)
        self._release(sum(members.pop(i, None) is not None for i in lost))
        ordered = tuple(members[i] for i in sorted(members))
        group = Group(group_id, ordered[0].ticket.task, ordered, self._group_size)
        self._complete[group_id] = group
        return group

    def take(self, group_ids: Sequence[str]) -> list[Group]:
        """Give complete groups away, ordered by group id whatever order they finished in."""
        groups = [self._complete.pop(g) for g in sorted(group_ids)]
        for group in groups:
            self._release(len(group.trajectories))
        return groups

    def discard(self, group_id: str) -> None:
        """Forget a group, complete or not; an unknown one is fine."""
        if group := self._complete.pop(group_id, None):
            self._release(len(group.trajectories))
        if members := self._growing.pop(group_id, None):
            self._release(len(members))

    def _release(self, num_trajectories: int) -> None:
        self._num_trajectories -= num_trajectories
        assert self._num_trajectories >= 0
