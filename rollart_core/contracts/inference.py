"""Inference engines: token ids in, token ids and their logprobs out.

The lifecycle is ``start -> (generate | load_weights | pause | resume | abort | release)* ->
close``, all on one asyncio loop. ``generate`` calls run concurrently and the engine batches them.
Between ``sleep`` and ``wake``, an engine only answers ``stats`` and ``close``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import InferenceFailure
from rollart_core.types import Message, TokenSpan, ToolCall, ToolSpec

FinishReason = Literal["stop", "length", "abort"]
KvOnSwap = Literal["recompute", "keep"]
SCORE_BOUNDARY = "engine.score"
Health = Literal["up", "down", "lost"]
"""``down``: unavailable until its restart completes. ``lost``: permanently unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceEngineSpec(PluginSpec):
    """The spec of an inference engine."""

    keeps_deterministic: bool = True
    """Whether it supports ``deterministic: true``: the same seeds give the same tokens."""
    takes_index: bool = False
    """Whether its constructor receives ``engine_index``: the index among the engines of the run,
    from 0. A restart keeps the index."""

    takes_text: bool = False
    """Whether it also serves models whose tokens are available only on the server (``model.kind:
    remote``). See :attr:`GenerateRequest.messages`."""
    follows_training: bool = True
    """Whether it loads new weights. If False, it is for evaluation only."""
    merges_adapters: bool = False
    """Whether it receives LoRA adapters from the weight channel and merges them into its initial
    model (``lora.sync: adapter``). Otherwise it receives full weights."""
    serves_adapters: bool = False
    """Whether it loads LoRA adapters beside its unchanged initial model (``lora.sync: adapter``).
    Its constructor then receives ``lora``, the section of the config. A turn ends with the adapter
    that it began with."""
    scores: bool = False
    """Whether it implements :meth:`InferenceEngine.score`, which a teacher needs."""
    sleeps: bool = False
    """Whether it implements :meth:`InferenceEngine.sleep` and ``wake``, which ``runtime.colocate``
    needs. Its constructor receives ``sleeps`` if the run uses them."""
    devices_option: str | None = None
    """The option with the number of accelerators that one engine takes on one machine. None means
    one."""
    first_device_option: str | None = None
    """The option with the index of the first engine's first accelerator on the machine. It has no
    effect if the cluster assigns accelerators to each engine. An engine with this option is built
    with ``has_own_devices``: whether it sees only its own accelerators."""
    start_option: str | None = None
    """The option with the maximum seconds until an engine has started. A restart may take as long.
    None means that an engine starts within a few minutes."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to generate one turn."""

    request_id: str
    """Unique among the requests in flight."""
    token_ids: Sequence[int]
    """The whole prompt, including earlier turns. A run sends an ``array("i")``."""
    max_new_tokens: int
    """Maximum number of tokens to generate."""
    session_id: str = ""
    """Each request of a session extends the previous one. The engine keeps the session's KV cache
    until ``release``. If empty, it keeps nothing."""
    group_id: str = ""
    """Sessions of one group may share the KV cache of a common prefix."""
    temperature: float = 1.0
    """Sampling temperature. 0 means greedy; logprobs are then those of temperature 1."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends after one of these tokens. The result includes it."""
    sampling_key: int = 0
    """Key of the randomness. Token ``t`` of the answer uses counter ``t``. See
    :func:`rollart_core.types.sampling_key`."""
    env_id: str = ""
    """The environment of the turn. A placement may use different engines per environment."""
    messages: Sequence[Message] | None = None
    """The conversation as text, instead of ``token_ids``, for engines with ``takes_text``."""
    tools: Sequence[ToolSpec] = ()
    """The tools that the model may call. Set only with ``messages``; ``token_ids`` already contain
    them."""
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Values of variables of the server's chat template. Set only with ``messages``."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request for the logprobs of given tokens."""

    request_id: str
    """Unique among the requests in flight."""
    token_ids: Sequence[int]
    """The whole token row, ``[T]``."""
    positions: Sequence[int]
    """Ascending indices of the tokens to score, from 1. Each is conditioned on all tokens before
    it."""
    temperature: float = 1.0
    """Divisor of the logits, greater than 0."""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """The answer of a model whose tokens are available only on the server."""

    content: str
    """Text of the answer."""
    num_prompt_tokens: int = 0
    """Prompt tokens as counted by the server. 0 if the server does not report them."""
    num_new_tokens: int = 0
    """Generated tokens as counted by the server. 0 if the server does not report them."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls as parsed by the server."""
    reasoning: str = ""
    """The thought, if the server returns it apart from the answer."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The result of a :class:`GenerateRequest`."""

    token_ids: list[int]
    """The generated tokens."""
    inference_logprobs: list[float]
    """One logprob per token, of the temperature-scaled, untruncated distribution."""
    spans: tuple[TokenSpan, ...]
    """Contiguous spans that cover all tokens in order."""
    finish_reason: FinishReason
    """Why generation ended."""
    num_cached_tokens: int = 0
    """Prompt tokens that the engine read from its cache."""
    text: TextAnswer | None = None
    """The answer to a request with ``messages``. Then there are no tokens."""
    inserted: tuple[int, int] = (0, 0)
    """``[start, stop)`` of tokens that were not sampled: the end mark of a thought that reached
    ``rollout.max_thinking_tokens``. Engines leave it empty."""


@dataclass(frozen=True, slots=True)
class WeightSwap:
    """The cost of one weight swap."""

    policy_version: int
    """The version that the engine has loaded."""
    stall_s: float
    """Seconds without generation because of the swap."""
    num_bytes: int
    """Bytes of the weights."""
    num_recomputed_tokens: int = 0
    """Tokens whose KV cache the engine recomputed."""
    fetch_s: float = 0.0
    """Seconds of the fetch, during which generation continued."""
    moved_bytes: int = 0
    """Bytes received through the channel. 0 if the channel does not count them."""
    num_restarted: int = 0
    """Number of generations that restarted because of the swap."""
    engine: str = ""
    """Name of the engine. Set by the caller that has several engines."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start and current gauges."""

    policy_version: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_sessions: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    kv_used: float = 0.0
    """Share of the KV cache in use, from 0 to 1."""
    extra: dict[str, float] = field(default_factory=dict)


class InferenceEngine(ABC):
    """Base class of inference engines."""

    pool: str = "local"
    """Name of its pool in the placement."""
    health: Health = "up"
    """If not ``up``, requests go to other engines. An engine in the same process is always
    ``up``."""
    on_health: Callable[[InferenceEngine], None] | None = None
    """Called after each change of ``health``."""

    def kill(self, reason: str) -> None:
        """Mark the engine as dead. An engine in its own process may restart."""
        self.health = "lost"
        if self.on_health is not None:
            self.on_health(self)

    @abstractmethod
    async def start(self) -> None:
        """Load the model and return when the engine is ready."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn.

        Raises:
            InferenceFailure: If the request cannot be answered, because the engine is gone or the
                request is invalid.
            ContextOverflow: If the conversation exceeds a context length that only the engine can
                check.
        """

    async def score(self, request: ScoreRequest) -> list[float]:
        """Return the logprob of each requested token, of the untruncated distribution.

        Optional. An engine that implements it sets ``scores`` in its spec.

        Raises:
            InferenceFailure: If the request cannot be answered, or the engine does not implement
                it.
        """
        raise not_scoring(type(self).__name__)

    @abstractmethod
    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Fetch a version from the weight channel and swap it in between two decode steps.

        If the channel no longer has it, the engine loads the newest. The result has the loaded
        version.

        Raises:
            LookupError: If the channel has neither.
            ValueError: If the weights do not fit the model or are damaged. The engine keeps the old
                weights.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating at the next token; requests in flight wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after ``pause``."""

    async def sleep(self) -> None:
        """Release the device's memory: the weights and the KV cache are lost.

        Optional. An engine that implements it sets ``sleeps`` in its spec. No request is in flight.

        Raises:
            InferenceFailure: If the memory is not released, or the engine does not implement it.
        """
        raise InferenceFailure(f"{type(self).__name__} cannot sleep", boundary="engine.sleep")

    async def wake(self, policy_version: int) -> WeightSwap:
        """Allocate the memory again after ``sleep``, with the weights of a version.

        The weights are loaded before the memory of the KV cache is allocated.

        Raises:
            LookupError: As in :meth:`load_weights`.
            InferenceFailure: If that fails, or the engine does not implement it.
        """
        raise InferenceFailure(f"{type(self).__name__} cannot wake", boundary="engine.wake")

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests now. Each returns its tokens so far with ``finish_reason`` ``abort``."""

    @abstractmethod
    async def release(self, session_id: str) -> None:
        """Drop a session and free its KV cache. Unknown ids are ignored."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Return counters and gauges."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything. May be called twice."""


def not_scoring(engine: str) -> InferenceFailure:
    """Return the failure of an engine without ``score``. It is not retryable."""
    failure = InferenceFailure(f"{engine} cannot score given tokens", boundary=SCORE_BOUNDARY)
    failure.retryable = False
    return failure
