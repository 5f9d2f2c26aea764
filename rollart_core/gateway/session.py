"""One running episode at the gateway: its key, its budget and its requests so far.

Takes: parsed requests. Gives: recorded answers, or the error for the program; after the episode its
samples, turns and failure. Never: uses HTTP, or answers after its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import (
    CancelledFailure,
    DeadlineFailure,
    EnvironmentFailure,
    EpisodeError,
    InferenceFailure,
    boundary,
)
from rollart_core.gateway.body import SamplingRequest
from rollart_core.gateway.errors import (
    RequestError,
    context_overflow,
    engine_failed,
    episode_over,
    out_of_turns,
)
from rollart_core.gateway.transcript import Answer, ModelCall, Transcript
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.rollout.episode import EpisodeLimits, Generator
from rollart_core.rollout.threads import DaemonThreads
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.types import Failure, Message, Sample, Ticket, Turn, sampling_key

MAX_CHARS_PER_TOKEN = 512
"""Upper bound of the characters per token. A longer prompt is rejected before it is tokenized."""
HEAVY_CHARS = 2**16
"""Longer prompts are tokenized in a thread, so that they do not block other requests."""
KEPT_SESSIONS = 8
"""Maximum number of sessions of one episode with a KV cache. Beyond it, the longest idle session is
released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySessionDependencies:
    """The components of a gateway session."""

    engine: Generator
    transcript: Transcript
    stop_token_ids: tuple[int, ...]
    seed: int
    max_context_tokens: int
    threads: DaemonThreads
    """Threads that tokenize long prompts."""


class GatewaySession:
    """One episode. Created by :meth:`rollart_core.gateway.gateway.Gateway.episode`.

    Args:
        ticket: The ticket of the episode.
        limits: Turns, tokens per turn, seconds per turn, temperature.
        parts: Engine and transcript.
        api_key: The key that the program sends.
        base_url: The URL that the program calls.
    """

    def __init__(
        self,
        ticket: Ticket,
        limits: EpisodeLimits,
        parts: GatewaySessionDependencies,
        api_key: str,
        base_url: str,
    ) -> None:
        self.ticket = ticket
        self.limits = limits
        self.api_key = api_key
        self.base_url = base_url
        self.turns: list[Turn] = []
        """Answered requests, in the order of their answers. ``step_s`` is the time until the
        program's next request."""
        self.spent = asyncio.Event()
        """Set when no turn is left. No further request is answered."""
        self.num_hung_up = 0
        """Number of requests whose program disconnected before the answer."""
        self.responses: dict[str, list[Message]] = {}
        """Response id -> messages up to that answer, for the responses API."""
        self.closed = False
        self.start_version = 0
        """Policy version of the engines at the start."""
        self._parts = parts
        self._transcript = parts.transcript
        self._at_transcript = asyncio.Lock()
        """Held while the transcript is used, which may be in a thread."""
        self._session = f"{ticket.ticket_id}#{ticket.attempt}"
        self._num_asked = 0
        self._num_open = 0
        """Admitted requests without an answer yet."""
        self._in_flight: set[asyncio.Future[GenerateResult]] = set()
        self._sessions: dict[str, None] = {}
        self._failures: dict[int, Failure] = {}
        self._answered_s: float | None = None
        self._overflowed = False

    @property
    def truncated(self) -> bool:
        """True if its last request was rejected because turns or the context were used up.

        A program whose messages exceed the context may continue with fewer messages.
        """
        return self.spent.is_set() or self._overflowed

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation of the last answered request, including its answer."""
        return tuple(self._transcript.messages)

    @property
    def failure(self) -> Failure | None:
        """Why a request failed that no later identical request replaced. None if there is none."""
        return next(iter(self._failures.values()), None)

    def samples(self) -> tuple[Sample, ...]:
        """Return the token rows of all conversations so far."""
        return self._transcript.samples()

    async def answer(
        self,
        show: Callable[[Transcript], ModelCall],
        sampling_request: SamplingRequest,
        num_chars: int,
    ) -> tuple[ModelCall, Answer, str]:
        """Answer one request.

        Args:
            show: Adds the request to the transcript.
            sampling_request: Its sampling parameters.
            num_chars: Length of its prompt in characters. 0 for a prompt of tokens.

        Returns:
            The call as sent to the engine, its recorded answer, and its id.

        Raises:
            RequestError: If the request is rejected or fails.
            asyncio.CancelledError: If its program has disconnected. Nothing is recorded.
        """
        self._admit()
        self._num_open += 1
        try:
            return await self._answer(show, sampling_request, num_chars)
        finally:
            self._num_open -= 1

    async def _answer(
        self,
        show: Callable[[Transcript], ModelCall],
        sampling_request: SamplingRequest,
        num_chars: int,
    ) -> tuple[ModelCall, Answer, str]:
        """Answer one admitted request."""
        began = time.perf_counter()
        if num_chars > self._parts.max_context_tokens * MAX_CHARS_PER_TOKEN:
            self._overflowed = True
            has = f"have {num_chars} characters, which are more"  # such prompts are not tokenized
            raise context_overflow(self._parts.max_context_tokens, has)
        try:
            ask = await self._shown(show, num_chars)
        except EnvironmentFailure as e:
            raise RequestError(str(e), param="messages") from e
        try:
            request = self._request(ask, sampling_request)
            result = await self._generated(request, ask)
            async with self._at_transcript:
                with boundary(InferenceFailure, "transcript"):
                    answer = self._transcript.record(ask, result, stop=sampling_request.stop)
        finally:
            self._transcript.drop(ask)
        self._note(ask, answer, began)
        return ask, answer, request.request_id

    async def _shown(self, show: Callable[[Transcript], ModelCall], num_chars: int) -> ModelCall:
        """Add a request to the transcript. A long one is processed in a thread."""
        async with self._at_transcript:
            if num_chars < HEAVY_CHARS:
                return show(self._transcript)
            run = self._parts.threads.run(lambda: show(self._transcript))
            work = asyncio.ensure_future(run)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                # The thread uses the transcript until it has finished.
                with suppress(EpisodeError):
                    self._transcript.drop(await work)
                raise

    def fail(self, error: EpisodeError) -> None:
        """Record a permanent failure."""
        self._failures.setdefault(-1, error.failure())

    async def close(self) -> None:
        """Stop the requests in flight and release the sessions."""
        self.closed = True
        await cancel_and_wait(*self._in_flight)
        for session in list(self._sessions):
            await self._parts.engine.release(session)
        self._sessions.clear()

    def _admit(self) -> None:
        if self.closed:
            raise episode_over()
        if len(self.turns) + self._num_open >= self.limits.max_turns:
            self.spent.set()
            raise out_of_turns(self.limits.max_turns)

    def _request(self, ask: ModelCall, sampling_request: SamplingRequest) -> GenerateRequest:
        """Return the request to the engine."""
        parts, limits = self._parts, self.limits
        if not ask.token_ids:
            raise RequestError("there is no prompt", param="prompt")
        if ask.token_limit < 1:
            self._overflowed = True
            has = f"resulted in {len(ask.token_ids)} tokens"
            raise context_overflow(parts.max_context_tokens, has)
        wanted = (
            limits.max_new_tokens
            if sampling_request.max_new_tokens is None
            else sampling_request.max_new_tokens
        )
        number, self._num_asked = self._num_asked, self._num_asked + 1
        return GenerateRequest(
            request_id=f"{self._session}/{number}",
            token_ids=ask.token_ids,
            max_new_tokens=min(wanted, limits.max_new_tokens, ask.token_limit),
            session_id=f"{self._session}~{ask.session}" if ask.session else self._session,
            group_id=self.ticket.group_id,
            temperature=limits.temperature,
            stop_token_ids=parts.stop_token_ids,
            sampling_key=sampling_key(parts.seed, self.ticket.ticket_id, number),
            env_id=self.ticket.task.env_id,
        )

    async def _generated(self, request: GenerateRequest, ask: ModelCall) -> GenerateResult:
        """Generate, and keep a failure until an identical request succeeds."""
        try:
            result = await self._generate(request)
        except EpisodeError as e:
            self._failures[hash(tuple(request.token_ids))] = e.failure()
            raise engine_failed(e, 504 if isinstance(e, DeadlineFailure) else 503) from e
        if self._failures:
            self._failures.pop(hash(tuple(request.token_ids)), None)
        return result

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        await self._keep(request.session_id)
        if self.closed:  # meanwhile
            raise episode_over()
        task = asyncio.ensure_future(self._ask_engine(request))
        self._in_flight.add(task)
        try:
            async with TimeLimit("generate", self.limits.generate_s):
                result = await task
        except asyncio.CancelledError:
            if self.closed and task.cancelled():
                raise episode_over() from None
            self.num_hung_up += 1
            raise
        finally:
            task.cancel()
            self._in_flight.discard(task)
        if result.finish_reason == "abort":
            raise CancelledFailure("generation was aborted", boundary="generate")
        return result

    async def _ask_engine(self, request: GenerateRequest) -> GenerateResult:
        with boundary(InferenceFailure, "generate"):
            return await self._parts.engine.generate(request)

    async def _keep(self, session: str) -> None:
        """Move a session to the end of the kept sessions, and release the oldest of too many."""
        self._sessions.pop(session, None)
        self._sessions[session] = None
        if len(self._sessions) > max(KEPT_SESSIONS, self._num_open):
            oldest = next(iter(self._sessions))
            del self._sessions[oldest]
            with suppress(EpisodeError):
                await self._parts.engine.release(oldest)

    def _note(self, ask: ModelCall, answer: Answer, began: float) -> None:
        """Add the turn, and set the duration of the previous turn's step."""
        self._overflowed = False
        if self.turns and self._answered_s is not None and began > self._answered_s:
            self.turns[-1] = replace(self.turns[-1], step_s=began - self._answered_s)
        self._answered_s = time.perf_counter()
        result = answer.result
        self.turns.append(
            Turn(
                observation=_shown(ask),
                action=answer.text,
                num_prompt_tokens=len(ask.token_ids),
                num_new_tokens=len(result.token_ids),
                finish_reason=result.finish_reason,
                reward=0.0,
                generate_s=self._answered_s - began,
                step_s=0.0,
                messages=(*ask.messages[ask.num_known :], answer.message) if ask.messages else (),
                continues=ask.continues,
                tools=tuple(ask.tools) if ask.continues < 0 else (),
            )
        )


def _shown(ask: ModelCall) -> str:
    """Return the new part of a request, as text."""
    if ask.text is not None:
        return ask.text
    new = ask.messages[ask.num_known :]
    if len(new) == 1 and new[0]["role"] == "user":
        return new[0]["content"]
    return "\n".join(f"{m['role']}: {m['content']}" for m in new)
