"""An inference engine with scripted answers: no model, any number of sessions.

Takes: requests. Gives: the result of a function of the request, after a modelled latency, with the
loaded version. Never: starts a thread or reads a clock; it waits on timers of the running event
loop, so it works with a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from rollart_core.contracts.inference import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    WeightSwap,
)
from rollart_core.contracts.weights import WeightChannel
from rollart_core.errors import InferenceFailure
from rollart_core.types import TokenSpan

Script: TypeAlias = Callable[[GenerateRequest], Sequence[int]]
"""From a request to the tokens of its answer; may raise."""
Latency: TypeAlias = float | Callable[[GenerateRequest], float]
"""Seconds a request takes."""
_Wake: TypeAlias = Literal["done", "abort", "closed"]

_PRIME = 1_000_003


def keyed_script(num_tokens: int = 8, vocab_size: int = 256) -> Script:
    """Return a script with answers by ``sampling_key``; all are equal at temperature 0."""

    def answer(request: GenerateRequest) -> list[int]:
        key = request.sampling_key if request.temperature else 0
        return [(key + (t + 1) * _PRIME) % vocab_size for t in range(num_tokens)]

    return answer


def text_script(
    answer: Callable[[str], str],
    *,
    decode: Callable[[Sequence[int]], str],
    encode: Callable[[str], Sequence[int]],
) -> Script:
    """Return a script that answers text to text.

    Args:
        answer: From the whole prompt to the answer.
        decode: From token ids to text.
        encode: From text to token ids.
    """
    return lambda request: encode(answer(decode(request.token_ids)))


class ScriptedEngine(InferenceEngine):
    """Answers from ``script``; ``calls`` holds every request, ``num_calls`` counts all calls.

    An answer is cut at ``max_new_tokens``, and ends with the first stop token of the request if it
    fits. Weights that arrive while a request is in flight give the second half of its tokens the
    new version. An aborted request returns the first half of its answer.

    Args:
        script: From a request to its tokens; None generates them from ``sampling_key``.
        num_tokens: Length of generated answers.
        vocab_size: Exclusive upper bound of generated token ids.
        latency_s: Seconds a request takes, or a function of the request.
        logprob: The logprob of every token.
        record: Keep the requests in ``calls``.
        channel: The channel for ``load_weights``; None accepts any version.
        policy_version: Version of the first weights.
        model_path: Accepted for compatibility, but not used; the same holds for the following.
        dtype: Not used.
        device: Not used.
        deterministic: Not used.
        kv_on_swap: Not used.
        max_context_tokens: Longer prompts are refused; None means no limit.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        num_tokens: int = 8,
        vocab_size: int = 256,
        latency_s: Latency = 0.0,
        logprob: float = -1.0,
        record: bool = True,
        channel: WeightChannel | None = None,
        policy_version: int = 0,
        model_path: str = "",
        dtype: str = "float32",
        device: str = "cpu",
        deterministic: bool = False,
        kv_on_swap: str = "recompute",
        max_context_tokens: int | None = None,
    ) -> None:
        self._script = script or keyed_script(num_tokens, vocab_size)
        self._latency_s = latency_s
        self._logprob = logprob
        self._record = record
        self._channel = channel
        self._max_context_tokens = max_context_tokens
        self.calls: list[GenerateRequest] = []
        self.num_calls: Counter[str] = Counter()
        self.policy_version = policy_version
        self._num_tokens = {"prefill_tokens": 0, "cached_tokens": 0, "decode_tokens": 0}
        self._sessions: dict[str, int] = {}
        self._in_flight: dict[str, asyncio.Future[_Wake]] = {}
        self._held: list[asyncio.Future[_Wake]] = []
        self._state: Literal["new", "running", "paused", "closed"] = "new"

    async def start(self) -> None:
        """Start the engine."""
        self.num_calls["start"] += 1
        self._state = "running"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request."""
        self._check(request)
        self.num_calls["generate"] += 1
        if self._record:
            self.calls.append(request)
        token_ids = self._answer(request)
        first_version = self.policy_version
        try:
            wake = await self._wait(request)
        finally:
            self._in_flight.pop(request.request_id, None)
        if wake == "closed":
            raise InferenceFailure("the engine was closed", boundary="generate")
        if wake == "abort":
            return self._result(request, token_ids[: len(token_ids) // 2], first_version, "abort")
        stopped = len(token_ids) < request.max_new_tokens or (
            bool(token_ids) and token_ids[-1] in request.stop_token_ids
        )
        return self._result(request, token_ids, first_version, "stop" if stopped else "length")

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Load a version, from the channel if there is one."""
        self.num_calls["load_weights"] += 1
        tensors = self._channel.fetch(policy_version) if self._channel else ()
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        self.policy_version = policy_version
        return WeightSwap(policy_version, stall_s=0.0, num_bytes=num_bytes)

    async def pause(self) -> None:
        """Hold all answers back."""
        self.num_calls["pause"] += 1
        self._state = "paused"

    async def resume(self) -> None:
        """Release held answers."""
        self.num_calls["resume"] += 1
        self._state = "running"
        while self._held:
            _settle(self._held.pop(), "done")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests; unknown ids are ignored."""
        self.num_calls["abort"] += 1
        self._wake(request_ids, "abort")

    async def release(self, session_id: str) -> None:
        """Release a session."""
        self.num_calls["release"] += 1
        self._sessions.pop(session_id, None)

    async def stats(self) -> EngineStats:
        """Return counters and gauges."""
        return EngineStats(
            policy_version=self.policy_version,
            num_running=len(self._in_flight),
            num_sessions=len(self._sessions),
            prefill_tokens=self._num_tokens["prefill_tokens"],
            cached_tokens=self._num_tokens["cached_tokens"],
            decode_tokens=self._num_tokens["decode_tokens"],
        )

    async def close(self) -> None:
        """Close the engine; may be called twice."""
        self.num_calls["close"] += 1
        self._state = "closed"
        self._sessions.clear()
        self._wake(self._in_flight, "closed")

    def _check(self, request: GenerateRequest) -> None:
        problem = ""
        if self._state in ("new", "closed"):
            problem = f"the engine is {self._state}"
        elif request.request_id in self._in_flight:
            problem = f"request {request.request_id!r} is in flight already"
        elif len(request.token_ids) > (self._max_context_tokens or len(request.token_ids)):
            problem = f"{len(request.token_ids)} tokens exceed {self._max_context_tokens}"
        if problem:
            raise InferenceFailure(problem, boundary="generate")

    def _answer(self, request: GenerateRequest) -> list[int]:
        token_ids = list(self._script(request))[: request.max_new_tokens]
        stops = request.stop_token_ids
        for position, token in enumerate(token_ids):
            if token in stops:
                return token_ids[: position + 1]
        if stops and len(token_ids) < request.max_new_tokens:
            token_ids.append(stops[0])
        return token_ids

    async def _wait(self, request: GenerateRequest) -> _Wake:
        latency = self._latency_s
        delay_s = latency(request) if callable(latency) else latency
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Wake] = loop.create_future()
        self._in_flight[request.request_id] = future
        timer: asyncio.Handle
        if delay_s:
            timer = loop.call_later(delay_s, _settle, future, "done")
        else:
            timer = loop.call_soon(_settle, future, "done")
        try:
            wake = await future
        finally:
            timer.cancel()
        while wake == "done" and self._state == "paused":
            self._in_flight[request.request_id] = held = loop.create_future()
            self._held.append(held)
            wake = await held
        return wake

    def _wake(self, request_ids: Iterable[str], wake: _Wake) -> None:
        for request_id in request_ids:
            if request_id in self._in_flight:
                _settle(self._in_flight[request_id], wake)

    def _result(
        self,
        request: GenerateRequest,
        token_ids: list[int],
        first_version: int,
        finish_reason: FinishReason,
    ) -> GenerateResult:
        num_prompt = len(request.token_ids)
        num_cached = min(self._sessions.get(request.session_id, 0), num_prompt - 1)
        if request.session_id:
            self._sessions[request.session_id] = num_prompt + len(token_ids)
        self._num_tokens["prefill_tokens"] += num_prompt - num_cached
        self._num_tokens["cached_tokens"] += num_cached
        self._num_tokens["decode_tokens"] += len(token_ids)
        return GenerateResult(
            token_ids=token_ids,
            inference_logprobs=[self._logprob] * len(token_ids),
            spans=self._spans(len(token_ids), first_version),
            finish_reason=finish_reason,
            num_cached_tokens=num_cached,
        )

    def _spans(self, num_tokens: int, first_version: int) -> tuple[TokenSpan, ...]:
        if not num_tokens:
            return ()
        if first_version == self.policy_version or num_tokens == 1:
            return (TokenSpan(0, num_tokens, first_version),)
        half = num_tokens // 2
        return (
            TokenSpan(0, half, first_version),
            TokenSpan(half, num_tokens, self.policy_version, "recomputed"),
        )


def _settle(future: asyncio.Future[_Wake], wake: _Wake) -> None:
    if not future.done():
        future.set_result(wake)
