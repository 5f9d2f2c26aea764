"""The records that travel through a run. They hold data and small facts about it, no behaviour.

Takes: nothing but the standard library; arrays are numpy's, which only type checkers import here.
Gives: the nouns of the vocabulary as frozen, slotted dataclasses. Never: imports another module of
RollArt, torch, or does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, NotRequired, TypeAlias, TypedDict

if TYPE_CHECKING:  # numpy takes a third of the time of a listing to import
    import numpy as np
    import numpy.typing as npt

IntArray: TypeAlias = "npt.NDArray[np.int32]"
FloatArray: TypeAlias = "npt.NDArray[np.float32]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"


class FunctionSpec(TypedDict):
    """What a tool is called, what it does, and what it takes."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]
    """A JSON schema of type ``object``; missing: the tool takes nothing."""


class ToolSpec(TypedDict):
    """One tool that the policy may call, in the shape of OpenAI's chat API."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionCall(TypedDict):
    """The function of a :class:`ToolCall`."""

    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(TypedDict):
    """One call that the policy wrote, in the shape of OpenAI's chat API."""

    id: str
    """Nine letters and digits: what the strictest chat templates take."""
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    """Of the assistant: what it thought, where a program keeps that apart."""
    tool_calls: NotRequired[list[ToolCall]]
    """Of the assistant: what it called."""
    tool_call_id: NotRequired[str]
    """Of a ``tool`` message: the call that it answers."""
    name: NotRequired[str]
    """Of a ``tool`` message: the tool that was called."""


Observation: TypeAlias = str | list[Message]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of an environment."""

    env_id: str
    split: str
    index: int
    """Index within the split."""
    seed: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """The order to produce one trajectory of one task."""

    ticket_id: str
    """``<group_id>.<index>``; the same after a restart and over retries."""
    task: Task
    group_id: str
    index: int
    """Position among the siblings of the group, from 0."""
    attempt: int = 0
    """0 for the first try, +1 for each retry."""


class FailureKind(StrEnum):
    """Which boundary a failed episode had crossed, or what ended it from outside."""

    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"
    INFERENCE = "inference"
    REWARD = "reward"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    INFRASTRUCTURE = "infrastructure"
    """A process or a node of the run was lost: one episode of each loss says so."""
    COLLATERAL = "collateral"
    """The other episodes that a loss, or the end of a process by one environment, took with it."""


INFRASTRUCTURE_KINDS: Final = frozenset({FailureKind.INFRASTRUCTURE, FailureKind.COLLATERAL})
"""Failures that say nothing about the environment in which they happened."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode has no reward. Failure is data: it is counted and retried, never scored 0."""

    kind: FailureKind
    boundary: str
    """The call that was crossed, such as ``env.step``."""
    message: str
    retryable: bool = True
    detail: str = ""
    """A traceback, where there is one."""

    @property
    def is_infrastructure(self) -> bool:
        """Whether the episode is replayed, and counts for no environment's failure rate."""
        return self.kind in INFRASTRUCTURE_KINDS


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Generated tokens ``[start, stop)`` that one policy version sampled."""

    start: int
    stop: int
    policy_version: int
    kv: Literal["fresh", "kept", "recomputed"] = "fresh"
    """How the KV cache behind the span came about when weights were swapped under it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One ``generate`` and the ``env.step`` that answered it."""

    observation: str
    """What the policy was shown, as text (the newest part of the prompt)."""
    action: str
    num_prompt_tokens: int
    """Length of the whole prompt of this turn."""
    num_new_tokens: int
    """Generated tokens."""
    finish_reason: Literal["stop", "length", "abort"]
    reward: float
    """What ``env.step`` returned."""
    generate_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row for training."""

    token_ids: IntArray
    """``[T]``."""
    loss_mask: BoolArray
    """``[T]``; True where the policy sampled the token."""
    inference_logprobs: FloatArray
    """``[T]``; of the temperature-scaled, untruncated distribution; 0 where not ``loss_mask``."""
    policy_versions: IntArray
    """``[T]``; -1 where ``loss_mask`` is False."""
    turn_ids: IntArray
    """``[T]``; the turn a sampled token belongs to, -1 elsewhere."""
    signals: Mapping[str, FloatArray] = field(default_factory=dict)
    """``[T]`` each: what others than the trainer say of its tokens, such as ``teacher_logprobs``;
    0 where not ``loss_mask``. Not kept in records."""

    @property
    def num_tokens(self) -> int:
        """Length of the row."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """How many of its tokens the policy sampled."""
        return int(self.loss_mask.sum())


Status = Literal["finished", "truncated", "failed"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The recorded data of one episode."""

    ticket: Ticket
    status: Status
    samples: tuple[Sample, ...] = ()
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    """None exactly when ``status`` is ``failed``."""
    score: float | None = None
    """The environment's own return, before any reward function; None when failed."""
    success: bool | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    start_version: int = 0
    """Policy version the engines held when the episode was dispatched."""
    wall_s: float = 0.0

    @property
    def oldest_version(self) -> int:
        """The smallest policy_version among its tokens; the dispatch version when it has none."""
        versions = [int(v) for s in self.samples for v in [_min_version(s)] if v is not None]
        return min(versions, default=self.start_version)

    @property
    def num_tokens(self) -> int:
        """Tokens over all its samples; of a failed one, as many as its last turn had come to."""
        if not self.samples and self.turns:
            return self.turns[-1].num_prompt_tokens + self.turns[-1].num_new_tokens
        return sum(s.num_tokens for s in self.samples)

    @property
    def num_loss_tokens(self) -> int:
        """Sampled tokens over all its samples."""
        return sum(s.num_loss_tokens for s in self.samples)


def _min_version(sample: Sample) -> int | None:
    sampled = sample.policy_versions[sample.loss_mask]
    return int(sampled.min()) if len(sampled) else None


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling trajectories of one task that are left after retries, without failed ones."""

    group_id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    num_dispatched: int
    """How many members the group was meant to have."""

    @property
    def oldest_version(self) -> int:
        """The smallest policy_version among its members."""
        return min(t.oldest_version for t in self.trajectories)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, in the order of the members."""
        return tuple(s for t in self.trajectories for s in t.samples)


def sampling_key(seed: int, ticket_id: str, turn: int) -> int:
    """Return the 63-bit key all randomness of one ``generate`` is drawn from.

    Token ``t`` of the call uses counter ``t`` under this key, so that what is sampled depends on
    seed, ticket, turn and token and on nothing else (not on batch mates or time).
    """
    digest = blake2b(f"{seed}/{ticket_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
