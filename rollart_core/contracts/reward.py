"""Rewards: score an episode. The input and the output are JSON.

    trajectory -> RewardRequest -> RewardService -> RewardBackend.invoke(RewardCall) -> RewardAnswer
                                                        |
                                     Reward.score | GroupReward.score_group, wherever it runs

A reward never receives tokens. ``stateless`` rewards may run in another process and may be retried.
They must return the same result for the same request. A backend with ``in_process`` is built with
the reward object. Any other backend is built with a :class:`RewardRef`, from which it builds the
reward at the place of execution. Failures are typed. A ``RewardFailure`` comes from the reward,
which would fail in the same way anywhere. A ``BackendFailure`` comes from the backend, so a retry
or another backend may succeed. A ``DeadlineFailure`` is a timeout. :mod:`rollart_core.rewards`
retries, and names the reward and the backend in every message.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import DeadlineFailure, RewardFailure
from rollart_core.types import Message

Need = Literal["messages", "answer", "context", "env_return", "success", "components"]
"""The data that a reward may request. ``answer`` is only the last message of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec(PluginSpec):
    """The spec of a reward function."""

    stateless: bool = True
    """Whether it gives the same result for the same request in any process."""
    group: bool = False
    """Whether it scores a whole group in one call (``score_group``)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The smallest and largest value."""
    needs: tuple[Need, ...] | None = None
    """The data in its requests, in addition to ids and counts. None means all data. Omitted fields
    have their defaults."""
    runs_on: Literal["pool", "inline"] = "pool"
    """The default backend. ``pool``: worker processes. ``inline``: threads of the controller, for a
    reward that computes little, only waits, or has its own processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBackendSpec(PluginSpec):
    """The spec of a reward backend (in process, worker pool, HTTP, serverless)."""

    in_process: bool = False
    """Whether it is built with the reward object, in the controller's process. Otherwise it is
    built with a :class:`RewardRef`."""


@dataclass(frozen=True, slots=True)
class RewardRef:
    """The id and options of a reward. ``registry.build`` builds the reward from them."""

    id: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Validated options with defaults, as plain JSON. They never contain keys or tokens. They
    contain the names of the environment variables with the secrets instead."""
    group: bool = False
    """Whether it scores a whole group in one call."""


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """The input of a reward function. Every field is plain JSON."""

    ticket_id: str
    env_id: str
    split: str
    task_index: int
    messages: tuple[Message, ...]
    """The whole conversation, as text."""
    env_return: float
    """The sum of the rewards that ``env.step`` returned."""
    success: bool | None
    components: Mapping[str, float] = field(default_factory=dict)
    """``reward_components`` in the info of the last step."""
    truncated: bool = False
    num_turns: int = 0
    num_loss_tokens: int = 0
    context: Mapping[str, Any] = field(default_factory=dict)
    """Data from the environment for its reward, which the policy never sees: ``reward_context`` of
    its infos. Later values replace earlier ones. The right answer is under ``reference``, and
    hidden tests are under ``tests``. An environment and its reward may agree on other keys."""
    attempt: int = 0
    """Attempt of the ticket. 0 for the first."""

    @property
    def answer(self) -> str:
        """The last message of the policy. Empty if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return message["content"]
        return ""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The output of a reward function. ``value`` is finite and within the declared range."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of a backend."""

    requests: tuple[RewardRequest, ...]
    """Independent requests. With ``group``, exactly one whole group."""
    idempotency_key: str
    """Identical for all attempts of the same requests, including a hedged request. Different for
    other requests. A backend may return the stored result of a key again."""
    deadline_s: float
    """Seconds from now. After that, the answer is ignored."""
    group: bool = False
    """Whether the requests go to one call of ``score_group``."""


@dataclass(frozen=True, slots=True)
class RewardCost:
    """The cost of one call, as far as its backend can measure it."""

    num_invocations: int = 1
    """Number of function calls or sent requests."""
    cold: bool | None = None
    """Whether the call needed a cold start. None if unknown."""
    billed_gb_s: float = 0.0
    """Billed memory times time, in GB-seconds."""
    run_s: float | None = None
    """Seconds in the reward itself, without transport."""


@dataclass(frozen=True, slots=True)
class RewardAnswer:
    """The answer of a backend to a call."""

    results: tuple[RewardResult | RewardFailure | DeadlineFailure, ...]
    """One result per request, in order. A request that cannot be scored has a failure and does not
    affect the others."""
    cost: RewardCost = RewardCost()


class Reward(ABC):
    """Base class of reward functions.

    A reward with resources (processes, sandboxes, a connection) may have ``close()``. Its backend
    calls it once, from any thread, when the backend closes. It is not called if the process is
    killed.
    """

    stateless: ClassVar[bool] = True

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode. Raise if it cannot be scored. Never return 0 instead."""


class GroupReward(ABC):
    """Base class of rewards that score a whole group. ``close()`` works as in :class:`Reward`."""

    stateless: ClassVar[bool] = True

    @abstractmethod
    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members of a group. Return one result per member, in order."""


class RewardBackend(ABC):
    """Base class of backends. A backend runs one reward function.

    The constructor receives the options and, by keyword, ``reward`` (the object if the spec has
    ``in_process``, else a :class:`RewardRef`), ``reward_range`` and ``timeout_s``, the maximum
    seconds of one call. Only ``score`` is required. The reward service calls ``invoke``.
    """

    async def open(self) -> None:  # noqa: B027 (optional: most backends need no check)
        """Check before the run whether the backend can be called. By default, do nothing.

        Raises:
            ConfigError: If it cannot be called: unknown function, wrong credentials, missing
                package.
        """

    @abstractmethod
    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request. A group reward receives one whole group.

        Raises:
            RewardFailure: If the reward itself cannot score one of them.
            BackendFailure: If the backend cannot be called, or its answer is invalid.
            DeadlineFailure: If the call took too long.
        """

    async def invoke(self, call: RewardCall) -> RewardAnswer:
        """Answer a call. By default, call ``score`` so that one request can fail alone.

        Raises:
            BackendFailure: If no request of the call could be answered.
            DeadlineFailure: If the call took too long.
        """
        if call.group or len(call.requests) < 2:
            return RewardAnswer(tuple(await self.score(call.requests)))
        single = (self._score_one(request) for request in call.requests)
        return RewardAnswer(tuple(await asyncio.gather(*single)))

    def gauges(self) -> Mapping[str, float]:
        """Return current gauges, such as ``{"workers": 3}``. By default, none."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Stop everything that the backend started. May be called twice."""

    async def _score_one(
        self, request: RewardRequest
    ) -> RewardResult | RewardFailure | DeadlineFailure:
        try:
            return (await self.score([request]))[0]
        except (RewardFailure, DeadlineFailure) as e:
            return e
