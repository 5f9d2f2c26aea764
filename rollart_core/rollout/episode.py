"""One episode, from reset to a recorded trajectory.

Takes: a ticket and the dependencies of its episode. Gives: a :class:`Trajectory`, also for a failed
episode. Never: retries, scores a failure, or leaves an environment or a session behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.contracts.tool_format import ParsedMessage
from rollart_core.errors import (
    CancelledFailure,
    ContextOverflow,
    EnvironmentFailure,
    EpisodeError,
    InferenceFailure,
    boundary,
)
from rollart_core.models.thinking import Thinking
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.env_answers import Observed, return_problem
from rollart_core.rollout.env_pool import EnvEpisode, EnvPool, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.text_conversation import TextConversation
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.rollout.tool_turn import step_with_tools
from rollart_core.rollout.tools.tool_set import ToolSet
from rollart_core.types import (
    Failure,
    Message,
    Observation,
    Sample,
    Ticket,
    TokenSpan,
    ToolSpec,
    Trajectory,
    Turn,
    sampling_key,
)


class Generator(Protocol):
    """The source of generations: the router, or one engine."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn."""

    async def release(self, session_id: str) -> None:
        """Forget a session."""


class ThoughtLimit:
    """Generates turns whose thoughts have at most ``limit`` tokens, with any engine.

        prompt -> thought, up to the limit -> its end mark, not sampled -> answer, in the same turn

    A turn whose thought ends by itself is not changed.

    Args:
        engine: Generates the tokens.
        tokenizer: The policy's tokenizer.
        thinking: How the policy writes thoughts.
        limit: Maximum number of tokens of a thought.
    """

    def __init__(
        self, engine: Generator, tokenizer: ChatTokenizer, thinking: Thinking, limit: int
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._thinking, self._limit = thinking, limit
        self._end = tokenizer.encode(thinking.closing)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; end its thought at the limit."""
        most = min(self._limit, request.max_new_tokens)
        begun = await self._engine.generate(replace(request, max_new_tokens=most))
        if begun.finish_reason != "length":
            return begun
        is_open = self._thinking.is_open(self._tokenizer.decode(begun.token_ids))
        end = self._end if is_open else []
        rest = request.max_new_tokens - len(begun.token_ids) - len(end)
        if rest < 1:
            return begun
        answer = await self._engine.generate(
            replace(
                request,
                request_id=f"{request.request_id}+answer",
                token_ids=[*request.token_ids, *begun.token_ids, *end],
                max_new_tokens=rest,
                sampling_key=sampling_key(request.sampling_key, "answer", 0),
            )
        )
        return _joined(begun, end, answer)

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        await self._engine.release(session_id)


def _joined(begun: GenerateResult, end: list[int], answer: GenerateResult) -> GenerateResult:
    """Return both results and the end mark between them as one result."""
    start = len(begun.token_ids)
    stop = start + len(end)
    last = begun.spans[-1]
    later = [TokenSpan(s.start + stop, s.stop + stop, s.policy_version, s.kv) for s in answer.spans]
    return replace(
        answer,
        token_ids=[*begun.token_ids, *end, *answer.token_ids],
        inference_logprobs=[
            *begun.inference_logprobs,
            *(0.0 for _ in end),
            *answer.inference_logprobs,
        ],
        spans=(*begun.spans[:-1], replace(last, stop=stop), *later),
        num_cached_tokens=begun.num_cached_tokens,
        inserted=(start, stop),
    )


class Dialogue(Protocol):
    """The conversation of one episode: a ``Conversation`` in tokens, or one in text."""

    @property
    def prompt(self) -> Sequence[int]:
        """The whole row so far."""

    @property
    def parsed(self) -> ParsedMessage | None:
        """The newest action, parsed; None without tools."""

    @property
    def newest(self) -> Message:
        """The newest action as a message, with its calls if it has any."""

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Set the tools that the policy may call."""

    def turn_limit(self, max_new_tokens: int) -> int:
        """Return the token limit of the next turn; 0 if the row is full."""

    def observe(self, observation: Observation) -> None:
        """Add an observation."""

    def record(self, result: GenerateResult) -> str:
        """Add the policy's message, and return the action."""

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples for training."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of one episode."""

    max_turns: int
    max_new_tokens: int
    temperature: float
    timeouts: PhaseTimeouts
    generate_s: float
    episode_s: float
    reward_range: tuple[float, float] | None = None
    """The range that the environment declares for the return of an episode; None if it declares
    none."""


@dataclass(frozen=True, slots=True)
class EpisodeDependencies:
    """The dependencies of episodes, shared by all episodes of one environment of a run."""

    env: EnvRef
    envs: EnvPool
    engine: Generator
    new_conversation: Callable[[], Dialogue]
    score: Callable[[RewardRequest], Awaitable[RewardResult]]
    """Has its own deadline (``deadlines.reward_s``), which starts with the first attempt."""
    stop_token_ids: tuple[int, ...]
    limits: EpisodeLimits
    seed: int
    success_from: float | None = None
    """The reward from which an episode is a success; None: the environment decides success."""
    expert: Callable[[EnvEpisode, GenerateRequest], Awaitable[GenerateResult]] | None = None
    """Replaces the engine, for demonstrations and baselines."""


@dataclass(slots=True)
class _Record:
    """The state of the episode so far."""

    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    env_return: float = 0.0
    last: Observed | None = None
    truncated: bool = False
    tools: ToolSet | None = None
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def components(self) -> Mapping[str, float]:
        """The reward components that the environment reported last."""
        return self.last.components if self.last else {}


async def run_episode(
    ticket: Ticket,
    start_version: int,
    deps: EpisodeDependencies,
    *,
    temperature: float | None = None,
    on_cancel: Callable[[Trajectory], None] | None = None,
) -> Trajectory:
    """Execute one attempt of a ticket.

    Args:
        ticket: The ticket.
        start_version: The current policy version of the engines.
        deps: Environments, engine, reward and limits.
        temperature: The temperature, for evaluations; None: that of the limits.
        on_cancel: Called with the partial trajectory if the caller cancels it.

    Returns:
        The trajectory. If the episode failed, it has a typed failure.

    Raises:
        asyncio.CancelledError: If the caller cancels it; all resources are released first.
    """
    began, record = time.perf_counter(), _Record()

    def failed(failure: Failure) -> Trajectory:
        return Trajectory(
            ticket,
            "failed",
            turns=tuple(record.turns),
            failure=failure,
            start_version=start_version,
            wall_s=time.perf_counter() - began,
        )

    try:
        async with TimeLimit("episode", deps.limits.episode_s):
            conversation = await _play(ticket, deps, record, temperature)
        result = await deps.score(_request(ticket, record, conversation))
    except EpisodeError as e:
        return failed(e.failure())
    except asyncio.CancelledError:
        if on_cancel:
            on_cancel(failed(CancelledFailure("cancelled", boundary="episode").failure()))
        raise
    success, score = _decided(result, record, deps.success_from)
    return Trajectory(
        ticket,
        "truncated" if record.truncated else "finished",
        samples=conversation.samples(),
        turns=tuple(record.turns),
        reward=result.value,
        score=score,
        success=success,
        reward_components={**record.components, **result.components},
        env_components=record.components,
        context=record.context,
        start_version=start_version,
        wall_s=time.perf_counter() - began,
    )


async def _play(
    ticket: Ticket, deps: EpisodeDependencies, record: _Record, temperature: float | None
) -> Dialogue:
    session_id, timeouts = f"{ticket.ticket_id}#{ticket.attempt}", deps.limits.timeouts
    conversation = deps.new_conversation()
    try:
        async with deps.envs.episode(session_id, timeouts, ticket.task) as episode:
            observed = await episode.reset(deps.env, ticket)
            record.context.update(observed.context)
            if observed.tools:
                with boundary(EnvironmentFailure, "tools"):
                    record.tools = ToolSet(observed.tools)
                    conversation.offer(record.tools.specs)
            while not record.truncated:
                with boundary(InferenceFailure, "conversation"):
                    conversation.observe(observed.observation)
                request = _generate_request(ticket, len(record.turns), conversation, deps)
                if request is None:
                    record.truncated = True
                    break
                if temperature is not None:
                    request = replace(request, temperature=temperature)
                try:
                    observed = await _turn(episode, request, observed, (conversation, record), deps)
                except ContextOverflow:
                    record.truncated = True
                    break
                if observed.done:
                    record.truncated = observed.truncated and not observed.terminated
                    break
                record.truncated = len(record.turns) >= deps.limits.max_turns
            check_return(record.env_return, deps.limits, "env.step")
    finally:
        await deps.engine.release(session_id)
    return conversation


async def _turn(
    episode: EnvEpisode,
    request: GenerateRequest,
    observed: Observed,
    so_far: tuple[Dialogue, _Record],
    deps: EpisodeDependencies,
) -> Observed:
    conversation, record = so_far
    began = time.perf_counter()
    async with TimeLimit("generate", deps.limits.generate_s):
        with boundary(InferenceFailure, "generate"):
            if deps.expert is None:
                result = await deps.engine.generate(request)
            else:
                result = await deps.expert(episode, request)
    if result.finish_reason == "abort":
        raise CancelledFailure("generation was aborted", boundary="generate")
    with boundary(InferenceFailure, "conversation"):
        action = conversation.record(result)
    generated, counted = time.perf_counter(), result.text
    messages, parsed = (*_messages(observed.observation), conversation.newest), conversation.parsed
    if record.tools is None or parsed is None:
        answer = await episode.step(action)
    else:
        answer = await step_with_tools(episode, parsed, len(record.turns), record.tools)
    text = as_text(observed.observation)
    plain = (*_messages(text), Message(role="assistant", content=action))
    record.turns.append(
        Turn(
            observation=text,
            action=action,
            num_prompt_tokens=counted.num_prompt_tokens if counted else len(request.token_ids),
            num_new_tokens=counted.num_new_tokens if counted else len(result.token_ids),
            finish_reason=result.finish_reason,
            reward=answer.reward,
            generate_s=generated - began,
            step_s=time.perf_counter() - generated,
            messages=() if messages == plain else messages,
            tools=record.tools.specs if record.tools and not record.turns else (),
        )
    )
    record.messages += messages
    record.env_return += answer.reward
    record.context.update(answer.context)
    record.last = answer
    return answer


def _generate_request(
    ticket: Ticket, turn: int, conversation: Dialogue, deps: EpisodeDependencies
) -> GenerateRequest | None:
    """Return the request of the next turn, or None if the row is full."""
    limit = conversation.turn_limit(deps.limits.max_new_tokens)
    if limit < 1:
        return None
    session_id = f"{ticket.ticket_id}#{ticket.attempt}"
    return GenerateRequest(
        request_id=f"{session_id}/{turn}",
        token_ids=conversation.prompt,
        max_new_tokens=limit,
        session_id=session_id,
        group_id=ticket.group_id,
        temperature=deps.limits.temperature,
        stop_token_ids=deps.stop_token_ids,
        sampling_key=sampling_key(deps.seed, ticket.ticket_id, turn),
        env_id=ticket.task.env_id,
        messages=conversation.messages if isinstance(conversation, TextConversation) else None,
        tools=conversation.tools if isinstance(conversation, TextConversation) else (),
        template_kwargs=getattr(conversation, "template_kwargs", {}),
    )


def _request(ticket: Ticket, record: _Record, conversation: Dialogue) -> RewardRequest:
    last = record.last
    return RewardRequest(
        ticket_id=ticket.ticket_id,
        env_id=ticket.task.env_id,
        split=ticket.task.split,
        task_index=ticket.task.index,
        messages=tuple(record.messages),
        env_return=record.env_return,
        success=last.success if last else None,
        components=last.components if last else {},
        truncated=record.truncated,
        num_turns=len(record.turns),
        num_loss_tokens=sum(t.num_new_tokens for t in record.turns),
        context=record.context,
        attempt=ticket.attempt,
    )


def _decided(
    result: RewardResult, record: _Record, success_from: float | None
) -> tuple[bool | None, float]:
    """Return success and score: by the environment, or by the reward if it leaves them to it."""
    if success_from is None:
        return record.last.success if record.last else None, record.env_return
    return result.components.get("success", result.value) >= success_from, result.value


def check_return(value: float, limits: EpisodeLimits, what: str) -> None:
    """Check the return of an episode against the range of its environment.

    Raises:
        EnvironmentFailure: If it is outside the declared range, or too large without a range.
    """
    if problem := return_problem(value, limits.reward_range):
        raise EnvironmentFailure(f"{what}: {problem}", boundary=what)


def as_text(observation: Observation) -> str:
    """Return an observation as one text; each message begins with its role."""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{m['role']}: {m['content']}" for m in observation)


def _messages(observation: Observation) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return observation
