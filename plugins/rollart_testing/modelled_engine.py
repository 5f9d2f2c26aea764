"""An inference engine that takes the time a real one would, on a device that is not there.

Takes: a model's shape, a pool's figures, requests. Gives: made-up tokens, when
:class:`rollart_planner.engine_time.EngineTime` says. Never: runs a model, or reads another clock
than the running event loop's, so a loop with a virtual clock makes it virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollart_core.contracts.hardware import ModelShape, Pool
from rollart_core.contracts.inference import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    WeightSwap,
)
from rollart_core.errors import InferenceFailure
from rollart_core.types import TokenSpan
from rollart_planner.engine_time import EngineTime

TOKEN = 1
"""What every answer is made of."""


class ModelledEngine(InferenceEngine):
    """Answers as late as a device of ``pool`` would.

    Args:
        model: What it pretends to run.
        pool: What it pretends to run on; requests of its sessions keep their KV until released.
        num_new: From a request to the length of its answer; None: ``max_new_tokens``.
        load_s: How long a weight swap takes; nothing is generated meanwhile.
    """

    def __init__(
        self,
        model: ModelShape,
        pool: Pool,
        *,
        num_new: Callable[[GenerateRequest], int] | None = None,
        load_s: float = 0.0,
    ) -> None:
        self.pool = pool.name
        self._time = EngineTime(model, pool)
        self._num_new = num_new
        self._load_s = load_s
        self._version = 0
        self._sessions: dict[str, int] = {}
        self._answers: dict[str, asyncio.Future[int | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._open = asyncio.Event()
        self._num = {"prefill_tokens": 0, "cached_tokens": 0, "decode_tokens": 0}

    async def start(self) -> None:
        """Be ready."""
        self._open.set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn, after as long as that takes.

        Raises:
            InferenceFailure: When the row is longer than the device's memory.
        """
        await self._open.wait()
        loop = asyncio.get_running_loop()
        prompt = len(request.token_ids)
        cached = min(self._sessions.get(request.session_id, 0), prompt - 1)
        num_new = self._length(request)
        key = request.request_id
        if not self._time.submit(loop.time(), key, prompt=prompt, cached=cached, new=num_new):
            raise InferenceFailure(
                f"{prompt} + {num_new} tokens do not fit the device", boundary="generate"
            )
        answer: asyncio.Future[int | None] = loop.create_future()
        self._answers[key] = answer
        self._tick()
        try:
            given = await answer
        except asyncio.CancelledError:
            self._time.cancel(loop.time(), key)
            raise
        finally:
            self._answers.pop(key, None)
        return self._result(request, cached, num_new, given)

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Take a version; what runs goes on with it."""
        await asyncio.sleep(self._load_s)
        self._version = policy_version
        return WeightSwap(policy_version, stall_s=self._load_s, num_bytes=0)

    async def pause(self) -> None:
        """Take no new requests; those in flight go on."""
        self._open.clear()

    async def resume(self) -> None:
        """Take requests again."""
        self._open.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now."""
        now_s = asyncio.get_running_loop().time()
        for key in request_ids:
            if key in self._answers and not self._answers[key].done():
                self._answers[key].set_result(self._time.cancel(now_s, key))
        self._tick()

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)

    async def stats(self) -> EngineStats:
        """Return counters and gauges."""
        return EngineStats(
            policy_version=self._version,
            num_running=self._time.num_running,
            num_waiting=self._time.num_waiting,
            num_sessions=len(self._sessions),
            busy_s=self._time.busy_s,
            kv_used=self._time.kv_used,
            prefill_tokens=self._num["prefill_tokens"],
            cached_tokens=self._num["cached_tokens"],
            decode_tokens=self._num["decode_tokens"],
        )

    async def close(self) -> None:
        """End everything; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(InferenceFailure("the engine was closed", boundary="generate"))

    def _length(self, request: GenerateRequest) -> int:
        wanted = self._num_new(request) if self._num_new else request.max_new_tokens
        return max(1, min(wanted, request.max_new_tokens))

    def _tick(self) -> None:
        """Answer who is done, and look again when the next may be."""
        loop = asyncio.get_running_loop()
        for key, _ in self._time.advance(loop.time()):
            answer = self._answers.get(key)
            if answer is not None and not answer.done():
                answer.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._time.next_s()
        self._timer = None if next_s is None else loop.call_at(next_s, self._tick)

    def _result(
        self, request: GenerateRequest, cached: int, num_new: int, given: int | None
    ) -> GenerateResult:
        num_tokens = num_new if given is None else given
        reason: FinishReason = "abort"
        if given is None:
            reason = "length" if num_new == request.max_new_tokens else "stop"
        prompt = len(request.token_ids)
        if request.session_id:
            self._sessions[request.session_id] = prompt + num_tokens
        self._num["prefill_tokens"] += prompt - cached
        self._num["cached_tokens"] += cached
        self._num["decode_tokens"] += num_tokens
        return GenerateResult(
            token_ids=[TOKEN] * num_tokens,
            inference_logprobs=[-1.0] * num_tokens,
            spans=(TokenSpan(0, num_tokens, self._version),) if num_tokens else (),
            finish_reason=reason,
            num_cached_tokens=cached,
        )
