"""An inference engine that simulates the timing of a real engine on a given device.

:class:`EngineTime` computes the times: continuous batching on one device, by the roofline model.

    waiting --free batch row and cache space--> prefill step --> running --decode steps--> done
       ^                                                                |
       +------------------------ the next prompt comes first ------+

A step is either a prefill of all prompts that are admitted together, or a decode of all running
rows; prompts go first. A started step always completes; requests that arrive meanwhile wait for its
end.

Takes: a model's shape, a pool's figures, requests. Gives: placeholder tokens at the time of a real
engine. Never: runs a model, or reads a clock other than the running event loop's, so it works with
a virtual clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from rollart_planner.roofline import KV_SHARE, MAX_BATCH, decode_bounds, prefill_bounds

TOKEN = 1
"""The token of every answer."""


class ModelledEngine(InferenceEngine):
    """Answers with the latency of a device of ``pool``.

    Args:
        model: The simulated model.
        pool: The simulated pool; sessions keep their KV cache until released.
        num_new: From a request to the length of its answer; None means ``max_new_tokens``.
        load_s: Duration of a weight swap; nothing is generated meanwhile.
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
        """Start the engine."""
        self._open.set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn, after the simulated time.

        Raises:
            InferenceFailure: If the row does not fit the device's memory.
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
        """Load a version; running requests continue with it."""
        await asyncio.sleep(self._load_s)
        self._version = policy_version
        return WeightSwap(policy_version, stall_s=self._load_s, num_bytes=0)

    async def pause(self) -> None:
        """Accept no new requests; those in flight continue."""
        self._open.clear()

    async def resume(self) -> None:
        """Accept requests again."""
        self._open.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests now."""
        now_s = asyncio.get_running_loop().time()
        for key in request_ids:
            if key in self._answers and not self._answers[key].done():
                self._answers[key].set_result(self._time.cancel(now_s, key))
        self._tick()

    async def release(self, session_id: str) -> None:
        """Release a session."""
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
        """Close the engine; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(InferenceFailure("the engine was closed", boundary="generate"))

    def _length(self, request: GenerateRequest) -> int:
        wanted = self._num_new(request) if self._num_new else request.max_new_tokens
        return max(1, min(wanted, request.max_new_tokens))

    def _tick(self) -> None:
        """Answer the finished requests, and schedule the next check."""
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


@dataclass(slots=True)
class _Row:
    """A request and its progress."""

    key: str
    num_prompt: int
    num_cached: int
    num_new: int
    num_done: int = 0

    @property
    def context(self) -> int:
        return self.num_prompt + self.num_done


@dataclass(slots=True)
class _Phase:
    """Equal steps of one kind, which complete unless a request arrives."""

    began_s: float
    step_s: float
    num_steps: int
    admitted: list[_Row] = field(default_factory=list)
    """Rows of a prefill; empty for decode."""

    @property
    def ends_s(self) -> float:
        return self.began_s + self.num_steps * self.step_s


class EngineTime:
    """The timing model of one engine; ``now_s`` never decreases between calls.

    Args:
        model: The simulated model.
        pool: The figures of one device.
        max_batch: Maximum number of concurrent rows.
    """

    def __init__(self, model: ModelShape, pool: Pool, *, max_batch: int = MAX_BATCH) -> None:
        self._model = model
        self._pool = pool
        self._max_batch = max_batch
        cache_bytes = KV_SHARE * pool.memory_bytes - model.weight_bytes
        self._free_tokens = (
            cache_bytes / model.kv_bytes_per_token if pool.memory_bytes else math.inf
        )
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._done: list[tuple[str, float]] = []
        self._phase: _Phase | None = None
        self.busy_s = 0.0
        """Of completed steps."""

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch or in prefill."""
        return len(self._running) + (len(self._phase.admitted) if self._phase else 0)

    @property
    def kv_used(self) -> float:
        """Share of the cache that running requests hold or will hold."""
        return 0.0 if math.isinf(self._free_tokens) else self._held() / self._free_tokens

    def submit(self, now_s: float, key: str, *, prompt: int, cached: int, new: int) -> bool:
        """Submit a request.

        Args:
            now_s: Arrival time.
            key: Its key in ``advance``.
            prompt: Number of prompt tokens.
            cached: Number of prompt tokens that are already in the cache.
            new: Number of tokens to generate, at least 1.

        Returns:
            False if it does not fit even alone.
        """
        if prompt + new > self._free_tokens:
            return False
        self._run_until(now_s)
        self._waiting.append(_Row(key, prompt, min(cached, prompt - 1), max(1, new)))
        self._interrupt(now_s)
        return True

    def cancel(self, now_s: float, key: str) -> int:
        """Remove a request and return its number of generated tokens; 0 if it is unknown."""
        self._run_until(now_s)
        self._interrupt(now_s)
        rows = [*self._waiting, *self._running, *(self._phase.admitted if self._phase else [])]
        found = next((row for row in rows if row.key == key), None)
        self._waiting = deque(row for row in self._waiting if row.key != key)
        self._running = [row for row in self._running if row.key != key]
        if self._phase is not None and self._phase.admitted:
            self._phase.admitted = [r for r in self._phase.admitted if r.key != key]
        return found.num_done if found else 0

    def next_s(self) -> float | None:
        """Return when to call ``advance`` again; None means after the next submission."""
        if self._done:
            return self._done[0][1]
        return self._phase.ends_s if self._phase else None

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Return the finished requests and their end times."""
        self._run_until(now_s)
        done, self._done = self._done, []
        return done

    def _run_until(self, now_s: float) -> None:
        while self._phase is not None and self._phase.ends_s <= now_s:
            at_s = self._phase.ends_s
            self._finish(self._phase, self._phase.num_steps)
            self._begin(at_s)

    def _interrupt(self, now_s: float) -> None:
        """Cut a series of decode steps to admit a prompt, or start the next steps now."""
        phase = self._phase
        if phase is None:
            self._begin(now_s)
        elif not phase.admitted and self._waiting:
            over = math.ceil((now_s - phase.began_s) / phase.step_s) if phase.step_s else 0
            phase.num_steps = max(1, min(phase.num_steps, over))

    def _finish(self, phase: _Phase, num_steps: int) -> None:
        """Count the phase's steps as done; prefill gives the first token."""
        self.busy_s += num_steps * phase.step_s
        self._running += phase.admitted
        for row in phase.admitted or self._running:
            row.num_done += num_steps
        at_s = phase.began_s + num_steps * phase.step_s
        self._done += [(row.key, at_s) for row in self._running if row.num_done >= row.num_new]
        self._running = [row for row in self._running if row.num_done < row.num_new]
        self._phase = None

    def _begin(self, at_s: float) -> None:
        admitted = self._admit()
        if admitted:
            self._phase = _Phase(at_s, self._prefill_s(admitted), 1, admitted)
        elif self._running:
            num_steps = min(row.num_new - row.num_done for row in self._running)
            # All steps up to the next end have the duration of the middle one.
            contexts = [row.context + num_steps / 2 for row in self._running]
            step_s = max(decode_bounds(self._model, self._pool, contexts)) + self._pool.step_s
            self._phase = _Phase(at_s, step_s, num_steps)

    def _admit(self) -> list[_Row]:
        admitted: list[_Row] = []
        held = self._held()
        while self._waiting and len(self._running) + len(admitted) < self._max_batch:
            row = self._waiting[0]
            held += row.num_prompt + row.num_new
            if held > self._free_tokens:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill_s(self, rows: list[_Row]) -> float:
        parts = [
            prefill_bounds(
                self._model,
                self._pool,
                row.num_prompt - row.num_cached,
                row.num_cached,
                prompts=len(rows),
            )
            for row in rows
        ]
        longer = max(sum(part[0] for part in parts), sum(part[1] for part in parts))
        return longer + self._pool.step_s

    def _held(self) -> int:
        rows = [*self._running, *(self._phase.admitted if self._phase else [])]
        return sum(row.num_prompt + row.num_new for row in rows)
