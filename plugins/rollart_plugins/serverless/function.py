"""One reward function outside the run's process: in a worker, a container, a Lambda, a replica.

Takes: a reward by id and options; calls in the wire format. Gives: answers in the wire format, with
one result or failure for each request. Never: answers for another reward, runs code that a call
names, or lets a request wait for another that hangs.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import result_problem
from rollart_core.errors import (
    DeadlineFailure,
    RewardFailure,
    UserError,
    described,
    first_line,
    traced,
)
from rollart_core.plugins import registry
from rollart_core.rollout.threads import DaemonThreads
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.wire import Outcome, Refused, WireAnswer, WireCall

NUM_THREADS: Final = 16
"""Number of requests that one function scores concurrently."""
MAX_BYTES: Final = 32 << 20
"""Maximum size of one call, if the platform has no smaller limit."""
CLOSE_S: Final = 2.0
"""Maximum time for a reward to close."""
_NUM_KEPT: Final = 256
"""Number of cached answers, for callers that did not receive them."""


class RewardFunction:
    """One reward, ready to score; its coroutines run in one event loop.

    Args:
        reward_id: Id, alias or ``module:Class``.
        options: Options of the reward.
        num_threads: Number of requests that are scored concurrently; further ones wait.

    Raises:
        UserError: If the reward does not exist, or cannot be created with these options.
    """

    def __init__(
        self,
        reward_id: str,
        options: Mapping[str, Any] | None = None,
        *,
        num_threads: int = NUM_THREADS,
    ) -> None:
        spec: Any = registry.spec("rewards", reward_id)
        self.id: str = spec.id
        self._names = {reward_id, spec.id, spec.alias}
        checked = registry.checked_options("rewards", reward_id, options or {})
        self.digest = wire.digest(checked)
        try:
            reward = registry.build("rewards", reward_id, options or {})
        except UserError:
            raise
        except Exception as e:
            raise UserError(f"{reward_id} cannot be created: {described(e)}") from e
        self._reward: Reward | GroupReward = reward
        self._range: tuple[float, float] = spec.reward_range
        self._threads = DaemonThreads(num_threads, name="reward")
        self._cold = True
        self._ended = False
        self._kept: OrderedDict[str, tuple[tuple[str, ...], tuple[Outcome, ...]]] = OrderedDict()

    async def answer(self, body: bytes | Mapping[str, Any]) -> bytes:
        """Answer a call.

        Raises:
            Refused: If it is not a call, or is one for another reward.
        """
        call = wire.read_call(body)
        self._expect_own(call)
        cold, self._cold = self._cold, False  # the first call includes the start
        began = time.perf_counter()
        ids, results = self._kept.get(call.key, ((), ()))
        if ids != call.ids:
            scores = self._scores(call)
            found = await self._threads.run_all(scores, call.deadline_s) if scores else []
            results = self._outcomes(call, found)
        self._keep(call, results)
        run_s, num_hung = time.perf_counter() - began, self._threads.num_hung
        return wire.answer_bytes(WireAnswer(call.key, call.ids, results, run_s, cold, num_hung))

    async def close(self) -> None:
        """Release the threads, and close the reward; can be called twice."""
        self._threads.close()
        if not self._ended:
            self._ended = True
            await close_reward(self._reward)

    def end(self) -> None:
        """Close without an event loop."""
        self._threads.close()
        if not self._ended:
            self._ended = True
            _close(self._reward)

    def _expect_own(self, call: WireCall) -> None:
        if call.reward not in self._names:
            raise Refused(
                "mismatch", f"the function serves {self.id}, not {first_line(call.reward, 100)}"
            )
        if call.options != self.digest:
            raise Refused(
                "mismatch",
                f"the function serves {self.id} with other options than the run's, or another "
                "version of it: deploy it with the options in the run's config",
            )

    def _scores(self, call: WireCall) -> list[Callable[[], tuple[Outcome, ...]]]:
        """Return the calls to run in threads, one per request, or one for a whole group."""
        if isinstance(self._reward, GroupReward):
            whole = partial(self._scored_group, self._reward, call.requests)
            return [whole] if call.requests else []
        return [partial(self._scored, self._reward, request) for request in call.requests]

    def _outcomes(
        self, call: WireCall, found: Sequence[tuple[Outcome, ...] | None]
    ) -> tuple[Outcome, ...]:
        """Return an outcome for each request; a missing one is a DeadlineFailure."""
        num_late = len(call.requests) if isinstance(self._reward, GroupReward) else 1
        late = (_late(call.deadline_s),) * num_late
        return tuple(outcome for outcomes in found for outcome in outcomes or late)

    def _scored(self, reward: Reward, request: RewardRequest) -> tuple[Outcome]:
        """Score one request; runs in a thread."""
        try:
            return (self._checked(reward.score(request)),)
        except BaseException as e:  # a reward that tries to end the process is a failure
            return (_failure_of(e),)

    def _scored_group(
        self, reward: GroupReward, requests: tuple[RewardRequest, ...]
    ) -> tuple[Outcome, ...]:
        """Score a group; runs in a thread."""
        try:
            results = reward.score_group(requests)
            if len(results) != len(requests):
                raise ValueError(f"{len(results)} results for {len(requests)} requests")
            return tuple(map(self._checked, results))
        except BaseException as e:
            return (_failure_of(e),) * len(requests)

    def _checked(self, result: object) -> Outcome:
        if problem := result_problem(result, self._range):
            return RewardFailure(f"reward.score answered {problem}", boundary="reward.score")
        assert isinstance(result, RewardResult)
        return result

    def _keep(self, call: WireCall, results: tuple[Outcome, ...]) -> None:
        """Cache the results of a call without failures; a retry of a failure can succeed."""
        if any(isinstance(result, RewardFailure | DeadlineFailure) for result in results):
            return
        self._kept[call.key] = call.ids, results
        self._kept.move_to_end(call.key)
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)


async def close_reward(reward: object) -> None:
    """Call the ``close()`` of a reward, if it has one, with a time limit.

    It runs in a thread, because it can block or hang. Its errors are ignored.
    """
    if not hasattr(reward, "close"):
        return
    threads = DaemonThreads(1, name="reward")
    await threads.run_all([partial(_close, reward)], CLOSE_S)
    threads.close()


def _close(reward: object) -> None:
    close = getattr(reward, "close", None)
    if callable(close):
        with contextlib.suppress(Exception):
            close()


def _failure_of(error: BaseException) -> RewardFailure | DeadlineFailure:
    if isinstance(error, RewardFailure | DeadlineFailure):
        return error
    detail = traced(error, wire.MAX_DETAIL)
    return RewardFailure(
        f"reward.score: {described(error)}", boundary="reward.score", detail=detail
    )


def _late(limit_s: float) -> DeadlineFailure:
    message = f"reward.score took longer than {limit_s:.3g} s"
    return DeadlineFailure(message, boundary="reward.score")
