"""One environment for one episode: calls on its worker, and the failure if that is lost.

Takes: the place that :class:`rollart_core.rollout.env_pool.EnvPool` chose. Gives: reset, step and
the like, as typed answers. Never: leaves it open whose fault the loss of a worker is.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.errors import (
    CollateralFailure,
    EnvironmentFailure,
    EpisodeError,
    WorkerDied,
    WorkerLost,
)
from rollart_core.rollout.env_answers import Observed
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.rollout.worker_losses import WorkerLosses
from rollart_core.types import Task, Ticket

ANSWER_GRACE_S: Final = 5.0
"""How much later than the worker's own deadline the pool gives up on its answer."""


class EnvWorkerHandle(Protocol):
    """An env worker, here or in another process."""

    @property
    def alive(self) -> bool:
        """False when it will never answer again."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of :class:`rollart_core.rollout.env_worker.EnvWorker`."""

    async def close(self) -> None:
        """End it and all its environments."""


@dataclass(frozen=True, slots=True)
class PhaseTimeouts:
    """Seconds for each call."""

    reset_s: float
    step_s: float
    close_s: float = 10.0


@dataclass(slots=True, eq=False)
class Place:
    """A worker, and the episodes that are on it."""

    worker: EnvWorkerHandle
    losses: WorkerLosses
    own_task: Task | None = None
    """The only task whose environment is in this process; None: it is shared."""
    retired: bool = False
    is_lost: bool = False
    episodes: set[EnvEpisode] = field(default_factory=set)

    def failure(self, what: str, error: WorkerDied) -> EpisodeError:
        """Return how an episode fails whose call found the worker gone."""
        message = f"{what}: {error}"
        if self.own_task is not None:
            self.losses.ended_alone(self.own_task)
            alone = f"{message}; no other environment was in its process"
            return EnvironmentFailure(alone, boundary=what)
        if self.is_lost:
            return CollateralFailure(message, boundary=what)
        self.is_lost = True
        self.losses.lost(e.task for e in self.episodes if e.in_call and e.task is not None)
        return WorkerLost(message, boundary=what)


class EnvEpisode:
    """One environment, from reset to the end of one episode."""

    def __init__(
        self, place: Place, episode_id: str, timeouts: PhaseTimeouts, task: Task | None = None
    ) -> None:
        """Bind a worker to an episode id."""
        self._place = place
        self._worker = place.worker
        self.task = task
        self._id = episode_id
        self._timeouts = timeouts
        self.clean = True
        """False once a call failed: the environment is not used again."""
        self.is_agent = False
        """True once it was prepared: a program may sit in a thread of its own."""
        self.in_call = False
        """True while a call of it is on a worker that was alive when the call was made."""

    async def reset(self, env: EnvRef, ticket: Ticket) -> Observed:
        """Begin the ticket's task and return the first observation."""
        options = {"task": ticket.task.index, "split": ticket.task.split}
        observed: Observed = await self._call(
            "reset", env, seed=ticket.task.seed, options=options, timeout_s=self._timeouts.reset_s
        )
        return observed

    async def step(self, action: str) -> Observed:
        """Act."""
        observed: Observed = await self._call("step", action, timeout_s=self._timeouts.step_s)
        return observed

    async def oracle(self) -> str | None:
        """Return the expert's next action."""
        action: str | None = await self._call("oracle", timeout_s=self._timeouts.step_s)
        return action

    async def random_action(self, key: int) -> str:
        """Return what a player does who draws, by ``key``, among what is offered."""
        action: str = await self._call("random_action", key, timeout_s=self._timeouts.step_s)
        return action

    async def prepare(self, env: EnvRef, ticket: Ticket) -> AgentStart:
        """Begin the ticket's task, of an agent."""
        self.is_agent = True
        options = {"task": ticket.task.index, "split": ticket.task.split}
        start: AgentStart = await self._call(
            "prepare", env, seed=ticket.task.seed, options=options, timeout_s=self._timeouts.reset_s
        )
        return start

    async def run(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        """Run the agent's program to its end, or until it is stopped."""
        await self._call("run", endpoint, timeout_s=timeout_s)

    async def solve(self, *, timeout_s: float) -> None:
        """Do what an expert would in place of the agent's program."""
        await self._call("solve", timeout_s=timeout_s)

    async def stop(self, *, timeout_s: float) -> None:
        """End the agent's program; ``run`` returns."""
        async with TimeLimit("agent.stop", timeout_s):
            try:
                await self._worker.call("stop", self._id)
            except WorkerDied as e:
                raise self._place.failure("agent.stop", e) from e

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Judge what the agent's program has left."""
        result: AgentResult = await self._call("finish", recorded, timeout_s=self._timeouts.step_s)
        return result

    async def end(self) -> None:
        """Give the environment back; never raises."""
        timeout_s = self._timeouts.close_s
        with suppress(Exception):
            async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
                await self._worker.call("end", self._id, reusable=self.clean, timeout_s=timeout_s)

    async def _call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        what = f"agent.{method}" if self.is_agent else f"env.{method}"
        clean, self.clean = self.clean, False
        self.in_call = self._worker.alive
        try:
            late = f"{what}: the env worker does not answer"
            async with TimeLimit(what, timeout_s + ANSWER_GRACE_S, late):
                answer = await self._worker.call(
                    method, self._id, *args, timeout_s=timeout_s, **kwargs
                )
        except WorkerDied as e:
            raise self._place.failure(what, e) from e
        finally:
            self.in_call = False
        self.clean = clean
        return answer
