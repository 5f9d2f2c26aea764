"""The embedded inference engine: continuous batching in the caller's process, without a server.

    generate() -> waiting -> [slot free] -> running -> step, step, ... -> result
                                              ^  each step computes, for every running request, the
                                              |  tokens that are not in the cache yet, and samples
    load_weights() prepares new weights in a  |  after the newest token
    thread and swaps them between two steps --+

A row is scored by prefill in pieces, with the logits of every token.

Takes: token ids. Gives: token ids, logprobs and the policy_version of each span.
Never: tokenizes, or blocks the event loop for longer than one step.

A step treats prompt tokens, generated tokens, evicted tokens and (after a weight swap) stale tokens
in the same way: it computes the known tokens of a session that are not in its cache, oldest first.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
import torch

from rollart_core.contracts.inference import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    KvOnSwap,
    ScoreRequest,
    WeightSwap,
)
from rollart_core.contracts.weights import WeightChannel
from rollart_core.errors import InferenceFailure
from rollart_cpu.inference.decoder import RunnerOptions, load_runner, pick_device
from rollart_cpu.inference.runner import Runner, TokenBatch
from rollart_plugins.engines.config import EmbeddedConfig
from rollart_plugins.engines.incoming import AdapterBase, Incoming, Named, Stage, fetch
from rollart_plugins.engines.requests import ActiveRequest, Draws, check_request, refusal, sample
from rollart_plugins.engines.sessions import SessionTable

_SLOT_WAIT_S = 0.005
"""Interval of the checks for a free slot, for a row to be scored."""

PIECE_TOKENS = 128
"""Maximum number of rows computed in one pass; their logits need ``128 x vocabulary`` floats."""


class EmbeddedEngine(InferenceEngine):
    """Continuous batching with a cache that persists between the turns of a session."""

    def __init__(
        self,
        config: EmbeddedConfig | None = None,
        *,
        model_path: str,
        dtype: str = "float32",
        device: str = "auto",
        channel: WeightChannel | None = None,
        deterministic: bool = False,
        kv_on_swap: KvOnSwap = "recompute",
        max_context_tokens: int = 2048,
        policy_version: int = 0,
        sleeps: bool = False,
        **options: object,
    ) -> None:
        """Store the options; :meth:`start` loads the model.

        Args:
            config: Options of the engine.
            model_path: A Hugging Face model folder, or a hub id.
            dtype: ``float32`` or ``bfloat16``.
            device: ``auto``, ``cpu`` or ``cuda``.
            channel: Channel from which :meth:`load_weights` fetches.
            deterministic: Whether the samples of a request are bitwise independent of the other
                requests of a batch, arrival time, eviction and prefix sharing.
            kv_on_swap: Whether the cache is computed again after a weight swap.
            max_context_tokens: Maximum length of prompt and answer together.
            policy_version: Version of the weights at ``model_path``.
            sleeps: Has no effect; this engine can always sleep.
            options: The fields of ``config`` as keyword arguments, as the registry passes them.
        """
        self._config = config or EmbeddedConfig.model_validate(options)
        self._model_path, self._channel = model_path, channel
        self._keep_kv = kv_on_swap == "keep"
        self._options = RunnerOptions(
            dtype=dtype,
            compute_dtype=self._config.compute_dtype,
            device=device,
            num_slots=self._config.max_sessions,
            max_tokens=max_context_tokens,
            max_batch_tokens=max(self._config.max_batch_tokens, self._config.max_sessions),
            kv_cache_bytes=self._config.kv_cache_bytes,
            deterministic=deterministic,
            kernels=self._config.kernels,
            decoder=self._config.decoder,
        )
        self._version = policy_version
        self._runner: Runner | None = None
        self._sessions = SessionTable(0, 0)
        self._waiting: deque[ActiveRequest] = deque()
        self._running: list[ActiveRequest] = []
        self._in_flight: dict[str, ActiveRequest] = {}
        self._paused = False
        self._task: asyncio.Task[None] | None = None
        self._prefill_tokens = self._cached_tokens = self._decode_tokens = self._num_steps = 0
        self._busy_s = 0.0
        self._fetching = Lock()

    async def start(self) -> None:
        """Load the model; return when the engine is ready."""
        if self._task is not None:
            return
        self._wake, self._swap_lock = asyncio.Event(), asyncio.Lock()
        self._runner = runner = load_runner(self._model_path, self._options)
        self._base = AdapterBase(self._model_path, pick_device(self._options.device))
        self._sessions = SessionTable(runner.num_slots, runner.max_tokens)
        self._task = asyncio.create_task(self._serve(), name="rollart-embedded-engine")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See :meth:`InferenceEngine.generate`."""
        runner = self._ready()
        if request.request_id in self._in_flight:
            raise InferenceFailure(f"request id {request.request_id!r} is already in flight")
        prompt = check_request(request, vocab_size=runner.vocab_size, max_tokens=runner.max_tokens)
        active = ActiveRequest(
            request=request,
            prompt=prompt,
            limit=min(request.max_new_tokens, runner.max_tokens - len(prompt)),
            future=asyncio.get_running_loop().create_future(),
            stops=frozenset(request.stop_token_ids),
        )
        self._in_flight[request.request_id] = active
        self._waiting.append(active)
        self._wake.set()
        try:
            return await active.future
        finally:
            self._retire(active)  # the caller may have been cancelled

    async def score(self, request: ScoreRequest) -> list[float]:
        """See :meth:`InferenceEngine.score`.

        The row is computed in pieces, between the generation steps, in a separate slot.
        """
        runner = self._ready()
        check_score(request, vocab_size=runner.vocab_size, max_tokens=runner.max_tokens)
        while (session := self._sessions.acquire("", "")) is None:
            await asyncio.sleep(_SLOT_WAIT_S)
        session.busy = True
        try:
            while True:
                version = self._version
                found = await score_row(self._ready, session.slot, request)
                if version == self._version:  # else the weights changed meanwhile
                    return found
        finally:
            self._sessions.end_turn(session)

    def _ready(self) -> Runner:
        if self._runner is None:
            raise InferenceFailure("the engine is not running", boundary="engine.generate")
        return self._runner

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """See :meth:`InferenceEngine.load_weights`.

        Raises:
            LookupError: If the channel has neither this version nor a newer one.
            ValueError: If the tensors do not fit the model, or are corrupt. The old weights stay in
                use.
        """
        runner, channel = self._ready(), self._channel
        if channel is None:
            raise InferenceFailure("the engine has no weight channel", boundary="load_weights")
        stage = None if self._config.weight_buffers == 1 else runner.stage
        async with self._swap_lock:
            moved = -channel.moved_bytes
            fetched = await asyncio.to_thread(self._incoming, channel, policy_version, stage)
            began = time.perf_counter()  # no step runs from here to the end of this function
            num_bytes = fetched.num_bytes
            if stage is None:
                num_bytes = runner.load(fetched.tensors)
            else:
                runner.swap()
            lost = self._begin_version(fetched.policy_version)
            return WeightSwap(
                fetched.policy_version,
                time.perf_counter() - began,
                num_bytes,
                lost,
                fetch_s=fetched.fetch_s,
                moved_bytes=moved + channel.moved_bytes,
            )

    def _incoming(
        self,
        channel: WeightChannel,
        policy_version: int,
        stage: Callable[[Named], int] | None,
    ) -> Incoming:
        """Fetch in a thread, one fetch at a time: the thread of a cancelled caller continues."""
        prepare: Stage | None = None if stage is None else lambda tensors, files: stage(tensors)
        with self._fetching:
            return fetch(channel, policy_version, prepare, self._base)

    def _begin_version(self, policy_version: int) -> int:
        """Register new weights; return the number of tokens in flight that are computed again."""
        self._version = policy_version
        lost = 0
        for session in self._sessions:
            stale = session.swap(policy_version, keep=self._keep_kv)
            lost += stale if session.busy else 0
        return lost

    async def sleep(self) -> None:
        """Free the weights and the KV cache."""
        self._ready()
        self._runner = None
        self._sessions = SessionTable(0, 0)
        await asyncio.to_thread(_release_memory)

    async def wake(self, policy_version: int) -> WeightSwap:
        """Load the model again, then the weights of a version; see :meth:`load_weights`."""
        runner = await asyncio.to_thread(load_runner, self._model_path, self._options)
        self._sessions = SessionTable(runner.num_slots, runner.max_tokens)
        self._runner = runner
        return await self.load_weights(policy_version)

    async def pause(self) -> None:
        """Stop generating at the next token; requests in flight wait."""
        self._paused = True

    async def resume(self) -> None:
        """Continue after ``pause``."""
        self._paused = False
        if self._task is not None:
            self._wake.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; unknown ids are ignored."""
        for request_id in request_ids:
            active = self._in_flight.get(request_id)
            if active is not None:
                self._finish(active, "abort")

    async def release(self, session_id: str) -> None:
        """Remove a session and free its KV cache; unknown ids are ignored."""
        self._sessions.release(session_id)

    async def stats(self) -> EngineStats:
        """Return counters and gauges."""
        capacity = 1
        if self._runner is not None:
            capacity = max(1, self._runner.num_slots * self._runner.max_tokens)
        return EngineStats(
            policy_version=self._version,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_sessions=len(self._sessions),
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            decode_tokens=self._decode_tokens,
            busy_s=self._busy_s,
            kv_used=sum(s.num_kv for s in self._sessions) / capacity,
            extra={"steps": float(self._num_steps)},
        )

    async def close(self) -> None:
        """Release all resources; requests in flight fail."""
        task, self._task, self._runner = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for active in list(self._in_flight.values()):
            active.reject(InferenceFailure("the engine was closed", boundary="engine.generate"))
        self._in_flight.clear()
        self._waiting.clear()
        self._running.clear()
        if self._channel is not None:
            self._channel.close()

    async def _serve(self) -> None:
        """Run steps while there is work; other tasks of the loop run between two steps."""
        while True:
            if self._paused or not (self._running or self._waiting):
                self._wake.clear()
                await self._wake.wait()
                continue
            began = time.perf_counter()
            try:
                self._step(self._ready())
            except Exception as e:
                self._fail_all(e)
            self._busy_s += time.perf_counter() - began
            await asyncio.sleep(0)

    def _step(self, runner: Runner) -> None:
        """Compute one batch, and sample for requests whose newest token was computed."""
        self._admit()
        work = self._plan(runner)
        if not work:
            return
        batch, sampling = self._pack(work)
        logits = runner.forward(batch)
        self._num_steps += 1
        for active, count in work:
            assert active.session is not None
            active.session.num_kv += count
        if sampling:
            tokens, logprobs = sample(logits, _draws(sampling), native=runner.is_native)
            for active, token, logprob in zip(sampling, tokens, logprobs, strict=True):
                self._take(active, token, logprob)

    def _admit(self) -> None:
        """Assign sessions to waiting requests while there are slots."""
        while self._waiting:
            active = self._waiting[0]
            request = active.request
            session = self._sessions.acquire(request.session_id, request.group_id)
            if session is None:
                return
            self._waiting.popleft()
            session.begin_turn(active.prompt)
            if session.num_kv == 0:
                session.version = self._version
            active.session, active.num_cached = session, session.num_kv
            self._cached_tokens += session.num_kv
            self._running.append(active)

    def _plan(self, runner: Runner) -> list[tuple[ActiveRequest, int]]:
        """Return how many tokens of each running request this step computes.

        Requests that need one token come first, because this step produces their next sample.
        """
        budget = runner.max_batch_tokens
        work: list[tuple[ActiveRequest, int]] = []
        longer: list[ActiveRequest] = []
        for active in self._running:
            session = active.session
            assert session is not None
            if session.length - session.num_kv == 1 and session.settled:
                if budget:
                    work.append((active, 1))
                    budget -= 1
            else:
                longer.append(active)
        for active in longer:
            if budget and self._settle(active, runner):
                session = active.session
                assert session is not None
                count = min(budget, session.length - session.num_kv)
                work.append((active, count))
                budget -= count
        return work

    def _settle(self, active: ActiveRequest, runner: Runner) -> bool:
        """Copy a new session's prefix from a sibling; False to wait for the sibling's prefill."""
        session = active.session
        assert session is not None
        if session.settled or not self._config.share_prefixes:
            session.settled = True
            return True
        sibling, common = self._sessions.donor(session, self._version)
        if sibling is not None and common == 0:
            return False
        if sibling is not None:
            runner.copy_prefix(sibling.slot, session.slot, common)
            session.num_kv, session.version = common, sibling.version
            cached = min(common, len(active.prompt)) if not active.token_ids else active.num_cached
            self._cached_tokens += cached - active.num_cached
            active.num_cached = cached
        session.settled = True
        return True

    def _pack(
        self, work: list[tuple[ActiveRequest, int]]
    ) -> tuple[TokenBatch, list[ActiveRequest]]:
        """Return the batch, and the requests to sample for, in the order of its wanted rows."""
        pieces, slots, starts, lengths, wanted, sampling = [], [], [], [], [], []
        for i, (active, count) in enumerate(work):
            session = active.session
            assert session is not None
            start = session.num_kv
            pieces.append(session.tokens[start : start + count])
            slots.append(session.slot)
            starts.append(start)
            lengths.append(count)
            if start + count == session.length:
                wanted.append(i)
                sampling.append(active)
            if count > 1 or start < len(active.prompt):
                self._prefill_tokens += count
        columns = (np.array(c, np.int64) for c in (slots, starts, lengths, wanted))
        return TokenBatch(np.concatenate(pieces), *columns), sampling

    def _take(self, active: ActiveRequest, token: int, logprob: float) -> None:
        """Add a sampled token to its request."""
        if token < 0:
            self._reject(active, InferenceFailure("the model's logits are not finite"))
            return
        assert active.session is not None
        active.session.append(token)
        self._decode_tokens += 1
        reason = active.append(token, logprob, self._version)
        if reason is not None:
            self._finish(active, reason)

    def _finish(self, active: ActiveRequest, reason: FinishReason) -> None:
        active.resolve(reason)
        self._retire(active)

    def _reject(self, active: ActiveRequest, error: InferenceFailure) -> None:
        if active.session is not None:
            active.session.lose_cache()
            if self._runner is not None:
                self._runner.clear(active.session.slot)
        active.reject(error)
        self._retire(active)

    def _retire(self, active: ActiveRequest) -> None:
        """Remove a request from the queues; can be called twice."""
        if self._in_flight.get(active.request.request_id) is not active:
            return
        del self._in_flight[active.request.request_id]
        if active.session is None:
            self._waiting.remove(active)
        else:
            self._running.remove(active)
            self._sessions.end_turn(active.session)

    def _fail_all(self, error: Exception) -> None:
        """Fail all running requests after a failed step, which invalidates the cache."""
        for session in self._sessions:
            session.lose_cache()
        for active in list(self._running):
            failure = InferenceFailure(f"engine step: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._reject(active, failure)


def _draws(sampling: list[ActiveRequest]) -> Draws:
    return Draws(
        np.array([a.request.temperature for a in sampling], np.float32),
        np.array([a.request.sampling_key for a in sampling], np.uint64),
        np.array([len(a.token_ids) for a in sampling], np.uint64),
    )


def check_score(request: ScoreRequest, *, vocab_size: int, max_tokens: int) -> None:
    """Reject a request that cannot be answered.

    Raises:
        InferenceFailure: With the reason; a retry does not help.
    """
    tokens, places = np.asarray(request.token_ids), np.asarray(request.positions)
    if not len(tokens) or len(tokens) > max_tokens + 1:
        raise refusal(f"a row of {len(tokens)} tokens exceeds the context of {max_tokens}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise refusal(f"token id {bad} is not in the vocabulary of {vocab_size}")
    if len(places) and not (
        places[0] >= 1 and places[-1] < len(tokens) and (np.diff(places) > 0).all()
    ):
        raise refusal(f"positions must be ascending and between 1 and {len(tokens) - 1}")
    if not 0 < request.temperature < float("inf"):
        raise refusal(f"temperature is {request.temperature}, but must be greater than 0")


async def score_row(ready: Callable[[], Runner], slot: int, request: ScoreRequest) -> list[float]:
    """Return the logprob of each requested token.

    Args:
        ready: Returns the runner, or raises if the engine is closed.
        slot: A row of the cache that nothing else uses.
        request: The request to score.

    Raises:
        InferenceFailure: If the engine is closed meanwhile, or the logits are not finite.
    """
    tokens = np.asarray(request.token_ids, dtype=np.int64)
    places = np.asarray(request.positions, dtype=np.int64)
    found: list[float] = []
    end = int(places[-1]) if len(places) else 0  # the last requested token itself is not an input
    size = min(PIECE_TOKENS, ready().max_batch_tokens)
    for start in range(0, end, size):
        runner, stop = ready(), min(start + size, end)
        asked = places[(places > start) & (places <= stop)]
        batch = _piece(tokens[start:stop], slot, start, every_row=bool(len(asked)))
        logits = runner.forward(batch)
        if len(asked):
            found += _logprobs(logits, asked - 1 - start, tokens[asked], request.temperature)
        await asyncio.sleep(0)
    return found


def _piece(tokens: np.ndarray, slot: int, start: int, *, every_row: bool) -> TokenBatch:
    """Return consecutive tokens of one slot as a batch, by default only for their KV.

    The batch always requests the logits of at least one row, because a batch without any is
    unusual.
    """
    columns = (np.array([c], np.int64) for c in (slot, start, len(tokens), 0))
    return TokenBatch(tokens, *columns, every_row=every_row)


@torch.inference_mode()
def _logprobs(
    logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, temperature: float
) -> list[float]:
    """Return the logprob of one token after each of the given rows of logits ``[N, vocab]``."""
    chosen = logits[torch.from_numpy(rows).to(logits.device)].float() / temperature
    at = torch.from_numpy(tokens).to(logits.device)[:, None]
    logprobs = chosen.log_softmax(-1).gather(1, at).squeeze(1)
    if not bool(logprobs.isfinite().all()):
        raise InferenceFailure("the model's logits are not finite", boundary="engine.score")
    return [float(value) for value in logprobs.tolist()]


def _release_memory() -> None:
    """Return the memory of deleted tensors to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
