"""Inference engines: token ids in, token ids and their logprobs out.

The lifecycle is ``start -> (generate | load_weights | pause | resume | abort | release)* ->
close``, all on one asyncio loop. ``generate`` calls run at once and are batched by the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import InferenceFailure
from rollart_core.types import Message, TokenSpan, ToolCall, ToolSpec

FinishReason = Literal["stop", "length", "abort"]
KvOnSwap = Literal["recompute", "keep"]
SCORE_BOUNDARY = "engine.score"
Health = Literal["up", "down", "lost"]
"""``down``: gone, and coming back; ``lost``: for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceEngineSpec(PluginSpec):
    """What an inference engine says of itself."""

    keeps_deterministic: bool = True
    """Whether ``deterministic: true`` can be had with it: the same seeds, the same tokens."""
    takes_index: bool = False
    """Whether it is built with ``engine_index``: its number among the engines of the run, from 0,
    the same after a restart."""

    takes_text: bool = False
    """True when it also serves a model whose tokens only its server knows (``model.kind:
    remote``): see :attr:`GenerateRequest.messages`."""
    follows_training: bool = True
    """False when its weights stay what they are: it is for evaluation only."""
    merges_adapters: bool = False
    """Whether it takes LoRA adapters from the weight channel and adds them to the model it began
    with (``lora.sync: adapter``); else it is sent whole weights."""
    scores: bool = False
    """Whether it has :meth:`InferenceEngine.score`, which a teacher needs."""
    devices_option: str | None = None
    """Its option that says how many accelerators of one machine an engine takes; None: one."""
    first_device_option: str | None = None
    """Its option that says at which accelerator of the machine the first engine begins: nothing
    where the cluster gives each engine accelerators of its own. Such an engine is built with
    ``has_own_devices``: whether it sees no others."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn's generation."""

    request_id: str
    """Unique among requests in flight."""
    token_ids: Sequence[int]
    """The whole prompt, earlier turns included."""
    max_new_tokens: int
    session_id: str = ""
    """Requests of one session extend one another: the KV cache is kept for it until ``release``.
    Empty: nothing is kept."""
    group_id: str = ""
    """Sessions of one group may share the KV of a common prefix."""
    temperature: float = 1.0
    """0 means greedy; then logprobs are those of temperature 1."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends after one of these, which is part of what is returned."""
    sampling_key: int = 0
    """See :func:`rollart_core.types.sampling_key`; token ``t`` of the answer uses counter ``t``."""
    env_id: str = ""
    """Whose turn it is: a placement may keep environments apart."""
    messages: Sequence[Message] | None = None
    """The conversation as text, instead of ``token_ids``; for engines that take text."""
    tools: Sequence[ToolSpec] = ()
    """What may be called; said only with ``messages`` (``token_ids`` hold them already)."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """How likely are given tokens?"""

    request_id: str
    """Unique among requests in flight."""
    token_ids: Sequence[int]
    """The whole row."""
    positions: Sequence[int]
    """Which tokens of it are asked about, ascending, from 1 on; each given all before it."""
    temperature: float = 1.0
    """Logits are divided by it; above 0."""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """What a model whose tokens only its server knows has said."""

    content: str
    num_prompt_tokens: int = 0
    """As the server counts them; 0 where it does not say."""
    num_new_tokens: int = 0
    """The same."""
    tool_calls: tuple[ToolCall, ...] = ()
    """As the server took them out of what the model wrote."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What was generated."""

    token_ids: list[int]
    inference_logprobs: list[float]
    """One per token; of the temperature-scaled, untruncated distribution."""
    spans: tuple[TokenSpan, ...]
    """Contiguous, covering all tokens in order."""
    finish_reason: FinishReason
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    text: TextAnswer | None = None
    """The answer to ``messages``; then there are no tokens."""


@dataclass(frozen=True, slots=True)
class WeightSwap:
    """What one weight swap cost."""

    policy_version: int
    stall_s: float
    """How long no token was generated because of it."""
    num_bytes: int
    """Of the weights."""
    num_recomputed_tokens: int = 0
    fetch_s: float = 0.0
    """How long fetching took, while tokens were generated."""
    moved_bytes: int = 0
    """What came through the channel; 0 where it does not count."""
    num_restarted: int = 0
    """Generations that began again because of it."""
    engine: str = ""
    """Which engine; filled in by whoever has several."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and gauges of now."""

    policy_version: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_sessions: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    extra: dict[str, float] = field(default_factory=dict)


class InferenceEngine(ABC):
    """Base of inference engines."""

    pool: str = "local"
    """Where it is: the name of a pool of the placement."""
    health: Health = "up"
    """Anything but ``up``: requests go elsewhere. In one process it is always up."""
    on_health: Callable[[InferenceEngine], None] | None = None
    """Called whenever ``health`` has changed."""

    def kill(self, reason: str) -> None:
        """Treat it as dead; one in a process of its own may come back."""
        self.health = "lost"
        if self.on_health is not None:
            self.on_health(self)

    @abstractmethod
    async def start(self) -> None:
        """Load the model; returns when ready."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn.

        Raises:
            InferenceFailure: When the request cannot be answered (engine gone, nonsense asked).
            ContextOverflow: When the conversation has outgrown a context that it alone knows.
        """

    async def score(self, request: ScoreRequest) -> list[float]:
        """Return the logprob of each token asked about, of the untruncated distribution.

        Optional; an engine that has it says so in its spec.

        Raises:
            InferenceFailure: When the request cannot be answered, or the engine does not do this.
        """
        raise not_scoring(type(self).__name__)

    @abstractmethod
    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Fetch that version from the weight channel and swap it in between two decode steps.

        Where the channel no longer holds it, the newest is taken; the answer says which.

        Raises:
            LookupError: When the channel holds neither.
            ValueError: When the weights do not fit the model, or are damaged; the old ones stay.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating at the next token; requests in flight wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after ``pause``."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; each returns what it has with ``finish_reason`` ``abort``."""

    @abstractmethod
    async def release(self, session_id: str) -> None:
        """Forget a session and free its KV; unknown ids are fine."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Return counters and gauges."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; may be called twice."""


def not_scoring(engine: str) -> InferenceFailure:
    """Return what an engine without ``score`` answers; it is not worth a retry."""
    failure = InferenceFailure(f"{engine} cannot score given tokens", boundary=SCORE_BOUNDARY)
    failure.retryable = False
    return failure
