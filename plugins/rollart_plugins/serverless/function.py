"""One reward function as it runs away from the run: in a worker, a container, a Lambda, a replica.

Takes: a reward by id and options; calls in the wire's form. Gives: answers in the wire's form, one
result or failure for each request. Never: answers for another reward than its own, runs code that
a call names, or lets a request wait for another that hangs.
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
"""Requests that one function scores at once."""
MAX_BYTES: Final = 32 << 20
"""Of one call, where the platform does not have a smaller limit."""
CLOSE_S: Final = 2.0
"""How long a reward may take to close."""
_NUM_KEPT: Final = 256
"""Answers that are kept for a caller who did not get them."""


class RewardFunction:
    """One reward, ready to score; its coroutines run on one loop.

    Args:
        reward_id: Id, alias or ``module:Class``.
        options: The reward's own.
        num_threads: How many requests are scored at once; the others wait.

    Raises:
        UserError: When there is no such reward, or it cannot be made of these options.
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
            raise UserError(f"{reward_id} cannot be made: {described(e)}") from e
        self._reward: Reward | GroupReward = reward
        self._range: tuple[float, float] = spec.reward_range
        self._threads = DaemonThreads(num_threads, name="reward")
        self._cold = True
        self._ended = False
        self._kept: OrderedDict[str, tuple[tuple[str, ...], tuple[Outcome, ...]]] = OrderedDict()

    async def answer(self, body: bytes | Mapping[str, Any]) -> bytes:
        """Answer a call.

        Raises:
            Refused: When it is no call, or one for another reward.
        """
        call = wire.read_call(body)
        self._expect_own(call)
        cold, self._cold = self._cold, False  # whoever asks first has waited for the start
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
        """Let go of its threads, and close the reward; may be called twice."""
        self._threads.close()
        if not self._ended:
            self._ended = True
            await close_reward(self._reward)

    def end(self) -> None:
        """Do the same from a place without a loop."""
        self._threads.close()
        if not self._ended:
            self._ended = True
            _close(self._reward)

    def _expect_own(self, call: WireCall) -> None:
        if call.reward not in self._names:
            raise Refused("mismatch", f"it serves {self.id}, not {first_line(call.reward, 100)}")
        if call.options != self.digest:
            raise Refused(
                "mismatch",
                f"it serves {self.id} with other options than the run's, or of another version: "
                "deploy it with those of the run's config",
            )

    def _scores(self, call: WireCall) -> list[Callable[[], tuple[Outcome, ...]]]:
        """Return what scores a call, to run side by side in threads: a group is scored whole."""
        if isinstance(self._reward, GroupReward):
            whole = partial(self._scored_group, self._reward, call.requests)
            return [whole] if call.requests else []
        return [partial(self._scored, self._reward, request) for request in call.requests]

    def _outcomes(
        self, call: WireCall, found: Sequence[tuple[Outcome, ...] | None]
    ) -> tuple[Outcome, ...]:
        """Return an outcome for each request; those not found in time are late."""
        num_late = len(call.requests) if isinstance(self._reward, GroupReward) else 1
        late = (_late(call.deadline_s),) * num_late
        return tuple(outcome for outcomes in found for outcome in outcomes or late)

    def _scored(self, reward: Reward, request: RewardRequest) -> tuple[Outcome]:
        """Score one request, in a thread."""
        try:
            return (self._checked(reward.score(request)),)
        except BaseException as e:  # a reward that wants to end the process is a failed one
            return (_failure_of(e),)

    def _scored_group(
        self, reward: GroupReward, requests: tuple[RewardRequest, ...]
    ) -> tuple[Outcome, ...]:
        """Score a group, in a thread."""
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
        """Keep what was scored, and nothing that failed: another try may do better."""
        if any(isinstance(result, RewardFailure | DeadlineFailure) for result in results):
            return
        self._kept[call.key] = call.ids, results
        self._kept.move_to_end(call.key)
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)


async def close_reward(reward: object) -> None:
    """Call a reward's ``close()``, if it has one, and wait a little for it.

    In a thread: it may block, or hang. What it raises is nobody's business any more.
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
