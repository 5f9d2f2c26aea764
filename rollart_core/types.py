"""The records of a run. They contain data and derived properties, no behaviour.

Takes: only the standard library. Arrays are numpy arrays; only type checkers import numpy here.
Gives: the terms of the vocabulary as frozen, slotted dataclasses. Never: imports another RollArt
module or torch, or does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, NotRequired, TypeAlias, TypedDict

if TYPE_CHECKING:  # importing numpy takes a third of the time of `rollart list`
    import numpy as np
    import numpy.typing as npt

IntArray: TypeAlias = "npt.NDArray[np.int32]"
FloatArray: TypeAlias = "npt.NDArray[np.float32]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"


class FunctionSpec(TypedDict):
    """Name, description and parameters of a tool."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]
    """A JSON schema of type ``object``. If missing, the tool takes no parameters."""


class ToolSpec(TypedDict):
    """One tool that the policy may call, in the format of OpenAI's chat API."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionCall(TypedDict):
    """The function of a :class:`ToolCall`."""

    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(TypedDict):
    """One call that the policy wrote, in the format of OpenAI's chat API."""

    id: str
    """Nine letters and digits, as the strictest chat templates require."""
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    """For the assistant: its reasoning, if the program stores it separately."""
    tool_calls: NotRequired[list[ToolCall]]
    """For the assistant: its tool calls."""
    tool_call_id: NotRequired[str]
    """For a ``tool`` message: id of the call that it answers."""
    name: NotRequired[str]
    """For a ``tool`` message: name of the called tool."""


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
    """A request for one trajectory of one task."""

    ticket_id: str
    """``<group_id>.<index>``. Does not change after a restart or a retry."""
    task: Task
    group_id: str
    index: int
    """Index in the group, from 0."""
    attempt: int = 0
    """0 for the first attempt, +1 for each retry."""


class FailureKind(StrEnum):
    """The boundary at which an episode failed, or the external cause of its end."""

    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"
    INFERENCE = "inference"
    REWARD = "reward"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    INFRASTRUCTURE = "infrastructure"
    """A process or a node of the run was lost. One episode per loss has this kind."""
    COLLATERAL = "collateral"
    """The other episodes of a lost process or node, or of a process that one environment ended."""


INFRASTRUCTURE_KINDS: Final = frozenset({FailureKind.INFRASTRUCTURE, FailureKind.COLLATERAL})
"""Failures that are unrelated to the environment in which they occurred."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode has no reward. Failures are data: counted and retried, never scored 0."""

    kind: FailureKind
    boundary: str
    """The failed call, such as ``env.step``."""
    message: str
    retryable: bool = True
    detail: str = ""
    """The traceback, if there is one."""

    @property
    def is_infrastructure(self) -> bool:
        """Whether the episode is replayed and does not count in the environment's failure rate."""
        return self.kind in INFRASTRUCTURE_KINDS


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The generated tokens ``[start, stop)`` that one policy version sampled."""

    start: int
    stop: int
    policy_version: int
    kv: Literal["fresh", "kept", "recomputed"] = "fresh"
    """Origin of the KV cache of the span after a weight swap."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One ``generate`` call and the ``env.step`` call that follows."""

    observation: str
    """The newest part of the prompt, as text."""
    action: str
    """The policy's text without its thought."""
    num_prompt_tokens: int
    """Number of tokens in the whole prompt of this turn."""
    num_new_tokens: int
    """Number of generated tokens, including an appended end of a thought."""
    finish_reason: Literal["stop", "length", "abort"]
    reward: float
    """The reward that ``env.step`` returned."""
    generate_s: float
    step_s: float
    messages: tuple[Message, ...] = ()
    """The new messages of the prompt, then the policy's message with its calls and reasoning. Empty
    if these are a user message with ``observation`` and an assistant message with ``action``."""
    continues: int | None = None
    """Index of the turn whose conversation this turn continues; None: the previous turn. -1 begins
    a conversation."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools of the conversation; only for its first turn."""

    @property
    def reasoning(self) -> str:
        """The thought of the policy before the action, without its marks. Empty if none."""
        return self.messages[-1].get("reasoning_content", "") if self.messages else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row for training."""

    token_ids: IntArray
    """``[T]`` int32. The tokens of the row."""
    loss_mask: BoolArray
    """``[T]`` bool. True where the policy sampled the token."""
    inference_logprobs: FloatArray
    """``[T]`` float32. Logprobs of the temperature-scaled, untruncated distribution. 0 where
    ``loss_mask`` is False."""
    policy_versions: IntArray
    """``[T]`` int32. The policy version that sampled each token. -1 where ``loss_mask`` is
    False."""
    turn_ids: IntArray
    """``[T]`` int32. The turn of each sampled token. -1 where ``loss_mask`` is False."""
    signals: Mapping[str, FloatArray] = field(default_factory=dict)
    """Signal name -> ``[T]`` float32. Values that come from other models than the trainer, such as
    ``teacher_logprobs``. 0 where ``loss_mask`` is False. Not stored in records."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the row."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.loss_mask.sum())


Status = Literal["finished", "truncated", "failed"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The recorded data of one episode."""

    ticket: Ticket
    """The request that the trajectory fulfils."""
    status: Status
    """``finished``, ``truncated`` (by a budget or by the environment) or ``failed``."""
    samples: tuple[Sample, ...] = ()
    """Token rows for training, in order."""
    turns: tuple[Turn, ...] = ()
    """Turns of the episode, in order."""
    reward: float | None = None
    """The reward for training. None if and only if ``status`` is ``failed``."""
    score: float | None = None
    """The environment's own return, or the reward if it decides success. None if failed."""
    success: bool | None = None
    """Whether the environment reported success. None if it did not report it."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward, by name: those of the environment, and those of the reward function."""
    env_components: Mapping[str, float] = field(default_factory=dict)
    """Those of the environment alone, as its reward function received them."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """The environment's data for its reward function, such as the right answer."""
    failure: Failure | None = None
    """Why the episode failed. None if it did not fail."""
    start_version: int = 0
    """Policy version of the engines when the episode was dispatched."""
    wall_s: float = 0.0
    """Duration of the episode, in seconds."""

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among its tokens. Without tokens, the version at dispatch."""
        versions = [int(v) for s in self.samples for v in [_min_version(s)] if v is not None]
        return min(versions, default=self.start_version)

    @property
    def num_tokens(self) -> int:
        """Tokens over all its samples. For a failed episode, the tokens up to its last turn."""
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
    """The trajectories of one task that remain after retries, without failed ones."""

    group_id: str
    """Id of the group, a prefix of its ticket ids."""
    task: Task
    """The task of all members."""
    trajectories: tuple[Trajectory, ...]
    """The members, none of them failed."""
    num_dispatched: int
    """Number of dispatched members."""

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among its members."""
        return min(t.oldest_version for t in self.trajectories)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, in the order of the members."""
        return tuple(s for t in self.trajectories for s in t.samples)


def sampling_key(seed: int, ticket_id: str, turn: int) -> int:
    """Return the 63-bit key of all randomness in one ``generate`` call.

    Token ``t`` of the call uses counter ``t`` with this key. Sampling then depends only on seed,
    ticket, turn and token, not on the rest of the batch or on time.
    """
    digest = blake2b(f"{seed}/{ticket_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
