"""Rewards: from what happened in an episode to a number. JSON in, JSON out.

A reward never sees tokens. ``stateless`` rewards may leave the process and be retried; they must
give the same answer to the same request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rollart_core.contracts.spec import PluginSpec
from rollart_core.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec(PluginSpec):
    """What a reward function says of itself."""

    stateless: bool = True
    group: bool = False
    """True when it scores a whole group at once (``score_group``)."""
    reward_range: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBackendSpec(PluginSpec):
    """Where reward functions run (in process, worker pool, HTTP, serverless)."""


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


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What a reward function answers; ``value`` is finite and within the declared range."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


class Reward(ABC):
    """Base of reward functions."""

    stateless: ClassVar[bool] = True

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode. Raise to say that it cannot be scored; never answer 0 for that."""


class GroupReward(ABC):
    """Base of rewards that see the whole group."""

    stateless: ClassVar[bool] = True

    @abstractmethod
    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score all members of a group; one result for each, in order."""


class RewardBackend(ABC):
    """Runs reward functions somewhere."""

    @abstractmethod
    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request; raises RewardFailure when it cannot."""

    @abstractmethod
    async def close(self) -> None:
        """Stop whatever was started."""
