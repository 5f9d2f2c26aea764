"""Members of groups that are scored together: each waits until all are there.

    member played --> wait(request) ------------------------------------+
    scheduler: all played, or lost --> score(group_id, tickets) --> one result each

Takes: requests as members come to their end, and the word that no more will come. Gives: each its
own result. Never: decides who belongs to a group (the scheduler does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollart_core.contracts.reward import RewardRequest, RewardResult

ScoreGroup: TypeAlias = Callable[[Sequence[RewardRequest]], Awaitable[list[RewardResult]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    request: RewardRequest
    score: ScoreGroup
    result: asyncio.Future[RewardResult]


class WaitingGroups:
    """See the module."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def wait(self, request: RewardRequest, score: ScoreGroup) -> RewardResult:
        """Return the member's result, once its group was scored.

        Args:
            request: The member's.
            score: Scores its group.

        Raises:
            RewardFailure: When the group cannot be scored.
            DeadlineFailure: When it took too long.
        """
        member = _Member(request, score, asyncio.get_running_loop().create_future())
        self._members[request.ticket_id] = member
        try:
            return await member.result
        finally:
            if self._members.get(request.ticket_id) is member:
                del self._members[request.ticket_id]

    def score(self, ticket_ids: Sequence[str]) -> None:
        """Score these members, who are all there; in the background."""
        members = [self._members[t] for t in ticket_ids if t in self._members]
        if members:
            call = asyncio.ensure_future(_score(members))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """End what is under way; may be called twice."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _score(members: Sequence[_Member]) -> None:
    try:
        results = await members[0].score([member.request for member in members])
    except asyncio.CancelledError:
        for member in members:
            member.result.cancel()
        raise
    except Exception as e:
        for member in members:
            if not member.result.done():
                member.result.set_exception(e)
        return
    for member, result in zip(members, results, strict=True):
        if not member.result.done():
            member.result.set_result(result)
