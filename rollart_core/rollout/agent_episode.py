"""One episode of an agent task, whose trajectory is the program's requests to the gateway.

    prepare -> [a gateway session: run the program, which sends requests] -> finish -> reward

Takes: a ticket and the dependencies of its episode. Gives: a :class:`Trajectory`, also for a failed
episode. Never: retries, scores a failure, or leaves a program, a key or a session behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from rollart_core.contracts.agent import AgentResult, Endpoint, Recorded
from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.errors import (
    CancelledFailure,
    EnvironmentFailure,
    EpisodeError,
    InferenceFailure,
)
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.rollout.env_pool import EnvEpisode, EnvPool
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.episode import EpisodeLimits, check_return
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.types import Failure, Message, Sample, Status, Ticket, Trajectory, Turn

if TYPE_CHECKING:
    from rollart_core.gateway.gateway import Gateway
    from rollart_core.gateway.session import GatewaySession

LAST_WORDS_S: Final = 10.0
"""Seconds that a program may continue once its budget is spent; its result is judged."""
STOP_S: Final = 15.0
"""Maximum seconds to stop the program after that."""


@dataclass(frozen=True, slots=True)
class AgentDependencies:
    """The dependencies of agent episodes, shared by all episodes of a run."""

    env: EnvRef
    envs: EnvPool
    gateway: Gateway | None
    """None if no program runs."""
    score: Callable[[RewardRequest], Awaitable[RewardResult]]
    limits: EpisodeLimits
    model: str = "policy"
    """The model name that programs use in requests."""
    acts: Literal["program", "expert", "nobody"] = "program"
    """Who does the task before it is judged: its program, or for baselines its own ``solve`` or
    nobody."""


@dataclass(slots=True)
class _Record:
    """The state of the episode so far."""

    gateway_session: GatewaySession | None = None
    result: AgentResult | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self.gateway_session.turns) if self.gateway_session else ()

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.gateway_session.samples() if self.gateway_session else ()

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.gateway_session.messages if self.gateway_session else ()

    @property
    def truncated(self) -> bool:
        return bool(self.gateway_session and self.gateway_session.truncated) or bool(
            self.result and self.result.truncated
        )


async def run_agent_episode(
    ticket: Ticket,
    start_version: int,
    deps: AgentDependencies,
    *,
    temperature: float | None = None,
    on_cancel: Callable[[Trajectory], None] | None = None,
) -> Trajectory:
    """Execute one attempt of a ticket, as :func:`rollart_core.rollout.episode.run_episode` does.

    Raises:
        asyncio.CancelledError: If the caller cancels it; all resources are released first.
    """
    record = _Record()

    def failed(failure: Failure) -> Trajectory:
        return Trajectory(
            ticket,
            "failed",
            turns=record.turns,
            failure=failure,
            start_version=start_version,
            wall_s=time.perf_counter() - record.began,
        )

    try:
        async with TimeLimit("episode", deps.limits.episode_s):
            result = await _play(ticket, start_version, deps, record, temperature)
        scored = await deps.score(_request(ticket, record, result))
    except EpisodeError as e:
        # If a program waits for a failed generation, the deadline is not the cause of its failure.
        failure, missing = (
            e.failure(),
            record.gateway_session.failure if record.gateway_session else None,
        )
        return failed(failure if failure.is_infrastructure else missing or failure)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel(failed(CancelledFailure("cancelled", boundary="episode").failure()))
        raise
    status: Status = "truncated" if record.truncated else "finished"
    turns = record.turns
    if turns:
        turns = (*turns[:-1], replace(turns[-1], reward=result.reward))
    return Trajectory(
        ticket,
        status,
        samples=record.samples,
        turns=turns,
        reward=scored.value,
        score=result.reward,
        success=result.success,
        reward_components={**result.components, **scored.components},
        env_components=result.components,
        context=result.context,
        start_version=start_version,
        wall_s=time.perf_counter() - record.began,
    )


async def _play(
    ticket: Ticket,
    start_version: int,
    deps: AgentDependencies,
    record: _Record,
    temperature: float | None,
) -> AgentResult:
    episode_id = f"{ticket.ticket_id}#{ticket.attempt}"
    limits = deps.limits
    async with deps.envs.episode(episode_id, limits.timeouts, ticket.task) as episode:
        await episode.prepare(deps.env, ticket)
        if deps.acts == "expert":
            await episode.solve(timeout_s=limits.episode_s)
        if deps.acts != "program":
            record.result = await _finished(episode, Recorded(), limits)
            return record.result
        assert deps.gateway is not None, "a program needs a gateway"
        endpoint = deps.gateway.episode(
            ticket, limits, start_version=start_version, temperature=temperature
        )
        async with endpoint as gateway_session:
            record.gateway_session = gateway_session
            where = Endpoint(gateway_session.base_url, gateway_session.api_key, deps.model)
            error = await _ended(episode, where, gateway_session, limits.episode_s)
        _judgeable(gateway_session, error)
        recorded = Recorded(
            gateway_session.messages, len(gateway_session.turns), gateway_session.truncated
        )
        record.result = await _finished(episode, recorded, limits)
        return record.result


async def _finished(episode: EnvEpisode, recorded: Recorded, limits: EpisodeLimits) -> AgentResult:
    """Judge an episode, and check that its reward is in the declared range."""
    result = await episode.finish(recorded)
    check_return(result.reward, limits, "agent.finish")
    return result


async def _ended(
    episode: EnvEpisode, where: Endpoint, gateway_session: GatewaySession, timeout_s: float
) -> EpisodeError | None:
    """Run the program until it ends or is stopped after its budget; return its error."""
    program = asyncio.ensure_future(episode.run(where, timeout_s=timeout_s))
    spent = asyncio.ensure_future(gateway_session.spent.wait())
    try:
        await asyncio.wait({program, spent}, return_when=asyncio.FIRST_COMPLETED)
        if not program.done():
            await asyncio.wait({program}, timeout=LAST_WORDS_S)
        if not program.done():
            await episode.stop(timeout_s=STOP_S)
        try:
            await program
        except EpisodeError as e:
            return e
    finally:  # only the wait: the worker stops the program at the end of the episode
        await cancel_and_wait(program, spent)
    return None


def _judgeable(gateway_session: GatewaySession, error: EpisodeError | None) -> None:
    """Raise an error if the episode cannot be judged."""
    if gateway_session.failure is not None:
        raise InferenceFailure(
            gateway_session.failure.message, boundary=gateway_session.failure.boundary
        )
    if gateway_session.truncated:
        return  # its error is probably a result of the truncation
    if error is not None:
        raise error
    if not gateway_session.turns:
        message = f"the program ended without a request to {gateway_session.base_url}"
        raise EnvironmentFailure(message, boundary="agent.run")


def _request(ticket: Ticket, record: _Record, result: AgentResult) -> RewardRequest:
    turns = record.turns
    return RewardRequest(
        ticket_id=ticket.ticket_id,
        env_id=ticket.task.env_id,
        split=ticket.task.split,
        task_index=ticket.task.index,
        messages=record.messages,
        env_return=result.reward,
        success=result.success,
        components=result.components,
        truncated=record.truncated,
        num_turns=len(turns),
        num_loss_tokens=sum(turn.num_new_tokens for turn in turns),
        context=result.context,
        attempt=ticket.attempt,
    )
