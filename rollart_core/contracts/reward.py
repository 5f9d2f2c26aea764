"""Rewards: from what happened in an episode to a number. JSON in, JSON out.

    trajectory -> RewardRequest -> scoring room -> RewardBackend.invoke(RewardCall) -> RewardAnswer
                                                        |
                                     Reward.score | GroupReward.score_group, wherever it runs

A reward never sees tokens. ``stateless`` rewards may leave the process and be retried; they must
give the same answer to the same request. A backend that is ``in_process`` is built around the
reward object itself, any other around a :class:`RewardRef`, from which it builds the reward where
that is to run. What fails is typed: a ``RewardFailure`` is the reward's own (it would fail anywhere
in the same way), a ``BackendFailure`` its backend's (another try, or another backend, may do), a
``DeadlineFailure`` the clock's. :mod:`rollart_core.rewards` tries again, and says in every message
which reward and which backend it was.
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
"""What a reward may ask to be told; ``answer`` is the last message of the policy alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec(PluginSpec):
    """What a reward function says of itself."""

    stateless: bool = True
    group: bool = False
    """True when it scores a whole group at once (``score_group``)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    needs: tuple[Need, ...] | None = None
    """What its requests carry besides ids and counts; None: everything. What is left out has its
    default there."""
    runs_on: Literal["pool", "inline"] = "pool"
    """What scores it where a run names no backend: worker processes, or the controller's own
    threads, for what computes next to nothing, only waits, or has processes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBackendSpec(PluginSpec):
    """Where reward functions run (in process, worker pool, HTTP, serverless)."""

    in_process: bool = False
    """It is built around the reward object itself, in the controller's process; any other around a
    :class:`RewardRef`."""


@dataclass(frozen=True, slots=True)
class RewardRef:
    """A reward by id and options, from which ``registry.build`` makes it where it is to run."""

    id: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Checked and filled with defaults; plain JSON. Keys and tokens are never among them: they are
    named by the variable that holds them."""
    group: bool = False


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """What a reward function gets; every field is plain JSON."""

    ticket_id: str
    env_id: str
    split: str
    task_index: int
    messages: tuple[Message, ...]
    """The whole conversation, as text."""
    env_return: float
    """Sum of what ``env.step`` returned."""
    success: bool | None
    components: Mapping[str, float] = field(default_factory=dict)
    """``reward_components`` of the last step's info."""
    truncated: bool = False
    num_turns: int = 0
    num_loss_tokens: int = 0
    context: Mapping[str, Any] = field(default_factory=dict)
    """What the environment hands to its reward and the policy never sees: ``reward_context`` of its
    infos, later ones over earlier ones. A right answer stands under ``reference``, hidden tests
    under ``tests``; other keys are between an environment and its reward."""
    attempt: int = 0
    """Of the ticket; 0 for the first."""

    @property
    def answer(self) -> str:
        """The last message of the policy; empty where it said nothing."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return message["content"]
        return ""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What a reward function answers; ``value`` is finite and within the declared range."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardCall:
    """What a backend is asked at once."""

    requests: tuple[RewardRequest, ...]
    """Independent of each other; with ``group`` exactly one whole group."""
    idempotency_key: str
    """The same for every try of the same requests, a hedge included, and for no others: what has
    been worked out under a key may be answered again."""
    deadline_s: float
    """Seconds from now after which nobody waits for the answer."""
    group: bool = False
    """They are for ``score_group``, together."""


@dataclass(frozen=True, slots=True)
class RewardCost:
    """What one call has cost, as far as its backend knows."""

    num_invocations: int = 1
    """Functions called, requests sent."""
    cold: bool | None = None
    """True when something had to be started for it; None: not known."""
    billed_gb_s: float = 0.0
    """Memory times time, as platforms bill it."""
    run_s: float | None = None
    """How long the reward itself ran; the rest was the way there and back."""


@dataclass(frozen=True, slots=True)
class RewardAnswer:
    """What a backend answers to a call."""

    results: tuple[RewardResult | RewardFailure | DeadlineFailure, ...]
    """One for each request, in order: what cannot be scored fails by itself."""
    cost: RewardCost = RewardCost()


class Reward(ABC):
    """Base of reward functions.

    One that holds something (processes, boxes, a connection) may have ``close()``: its backend
    calls it, once and from any thread, when it ends. Where processes are killed nothing is called.
    """

    stateless: ClassVar[bool] = True

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode. Raise to say that it cannot be scored; never answer 0 for that."""


class GroupReward(ABC):
    """Base of rewards that see the whole group; ``close()`` as for :class:`Reward`."""

    stateless: ClassVar[bool] = True

    @abstractmethod
    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members of a group; one result for each, in order."""


class RewardBackend(ABC):
    """Runs one reward function somewhere.

    Its class is called with its options and, by keyword, ``reward`` (the object if its spec says
    ``in_process``, else a :class:`RewardRef`), ``reward_range`` and ``timeout_s``, the most seconds
    one call may take. ``score`` is all it must have; ``invoke`` is what the scoring room calls.
    """

    async def open(self) -> None:  # noqa: B027 (optional: most have nothing to find out)
        """Find out before the run whether it can be asked at all; by default nothing.

        Raises:
            ConfigError: When it cannot: no such function, wrong credentials, a missing package.
        """

    @abstractmethod
    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request; a group reward gets one whole group.

        Raises:
            RewardFailure: When the reward itself cannot score one of them.
            BackendFailure: When it could not be asked, or answered garbage.
            DeadlineFailure: When it took too long.
        """

    async def invoke(self, call: RewardCall) -> RewardAnswer:
        """Answer a call; by default with ``score``, so that one request fails without the others.

        Raises:
            BackendFailure: When nothing of it could be answered.
            DeadlineFailure: When it took too long.
        """
        if call.group or len(call.requests) < 2:
            return RewardAnswer(tuple(await self.score(call.requests)))
        single = (self._score_one(request) for request in call.requests)
        return RewardAnswer(tuple(await asyncio.gather(*single)))

    def gauges(self) -> Mapping[str, float]:
        """Return what there is to count now, such as ``{"workers": 3}``; by default nothing."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Stop whatever was started; may be called twice."""

    async def _score_one(
        self, request: RewardRequest
    ) -> RewardResult | RewardFailure | DeadlineFailure:
        try:
            return (await self.score([request]))[0]
        except (RewardFailure, DeadlineFailure) as e:
            return e
