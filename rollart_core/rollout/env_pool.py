"""The env workers of a run: where episodes are sent, and what happens when a worker goes bad.

Takes: a way to start a worker. Gives: :meth:`EnvPool.episode`, one environment for one episode.
Never: sends an episode to a worker with a hung thread; that one is retired when its last ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.errors import EnvironmentFailure, PartDied
from rollart_core.rollout.env_answers import Observed
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.types import Ticket

ANSWER_GRACE_S = 5.0
"""How much later than the worker's own deadline the pool gives up on its answer."""
MAX_START_RETRIES = 2
"""Of a worker that cannot be started."""
RETRY_S = 0.25
"""Before the first of them, and twice as long before the second."""


class Worker(Protocol):
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
class _Place:
    """A worker and how busy it is."""

    worker: Worker
    num_episodes: int = 0
    retired: bool = False


class EnvEpisode:
    """One environment, from reset to the end of one episode."""

    def __init__(self, worker: Worker, episode_id: str, timeouts: PhaseTimeouts) -> None:
        """Bind a worker to an episode id."""
        self._worker = worker
        self._id = episode_id
        self._timeouts = timeouts
        self.clean = True
        """False once a call failed: the environment is not used again."""
        self.is_agent = False
        """True once it was prepared: a program may sit in a thread of its own."""

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
            await self._worker.call("stop", self._id)

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
        try:
            late = f"{what}: the env worker does not answer"
            async with TimeLimit(what, timeout_s + ANSWER_GRACE_S, late):
                answer = await self._worker.call(
                    method, self._id, *args, timeout_s=timeout_s, **kwargs
                )
        except PartDied as e:
            raise EnvironmentFailure(f"{what}: {e}", boundary=what) from e
        self.clean = clean
        return answer


class EnvPool:
    """All env workers of a run; their number may change while it goes on."""

    def __init__(self, start_worker: Callable[[], Awaitable[Worker]], *, num_workers: int) -> None:
        """Describe the pool; ``start`` brings it up."""
        self._start_worker = start_worker
        self._num_workers = num_workers
        self._places: list[_Place] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._growing: asyncio.Task[None] | None = None
        self._closed = False
        self._numbers = itertools.count()
        self.num_replaced = 0
        self.on_replaced: Callable[[str], None] | None = None
        """Hears why, whenever a worker is replaced."""
        self.on_back: Callable[[], None] | None = None
        """Hears of each that is up in the place of another."""
        self._num_away = 0

    @property
    def num_workers(self) -> int:
        """How many there are, or will soon be again."""
        return self._num_workers

    @property
    def num_episodes(self) -> int:
        """Episodes under way."""
        return sum(place.num_episodes for place in self._places)

    async def start(self) -> None:
        """Start all workers.

        Raises:
            Exception: Why one could not be started; the others are up until ``close``.
        """
        starts = (self._start_one() for _ in range(self._num_workers))
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def resize(self, num_workers: int) -> None:
        """Have this many workers: returns when those that join are up.

        Those that leave, the least busy ones, get no more episodes and end when their last has.

        Raises:
            ValueError: When it is less than one.
        """
        if num_workers < 1:
            raise ValueError(f"{num_workers} env workers: at least 1 is needed")
        self._num_workers = num_workers
        self._drop_dead()
        while len(self._places) > num_workers:
            self._retire(min(self._places, key=lambda p: p.num_episodes))
        if len(self._places) < num_workers:
            await asyncio.shield(self._grow())

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on any worker."""
        return await (await self._least_busy()).worker.call(method, *args, **kwargs)

    @asynccontextmanager
    async def episode(self, episode_id: str, timeouts: PhaseTimeouts) -> AsyncIterator[EnvEpisode]:
        """Lend an environment for one episode, and take it back by whatever road that ends."""
        place = await self._least_busy()
        place.num_episodes += 1
        # Evaluations share ids, and of an episode that ends before it begins the end is remembered.
        episode = EnvEpisode(place.worker, f"{episode_id}~{next(self._numbers)}", timeouts)
        try:
            yield episode
        except BaseException:
            episode.clean = False
            raise
        finally:
            await asyncio.shield(asyncio.ensure_future(self._take_back(place, episode)))

    async def close(self) -> None:
        """End all workers."""
        self._closed = True
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)
        places, self._places = self._places, []
        await asyncio.gather(*(p.worker.close() for p in places), *self._closing)

    async def _take_back(self, place: _Place, episode: EnvEpisode) -> None:
        if not episode.clean:
            await self._inspect(place)
        if place.worker.alive:
            await episode.end()
            if episode.is_agent and not episode.clean:  # only its end shows whether it hangs
                await self._inspect(place)
        place.num_episodes -= 1
        if place.retired:
            self._close_if_idle(place)

    async def _inspect(self, place: _Place) -> None:
        """Retire a worker that is gone, silent, or has a thread that will not come back."""
        if place.retired:
            return
        try:
            async with asyncio.timeout(ANSWER_GRACE_S):
                hung = await place.worker.call("num_hung")
            why = f"{hung} of its threads hang"
        except TimeoutError:
            hung, why = 1, "it does not answer"
        except PartDied as e:
            hung, why = 1, str(e)
        if hung and not place.retired:
            self._retire(place)
            self._replaced(why)

    def _retire(self, place: _Place) -> None:
        """Send it no more episodes."""
        place.retired = True
        if place in self._places:
            self._places.remove(place)
        self._close_if_idle(place)

    def _close_if_idle(self, place: _Place) -> None:
        if place.num_episodes == 0:
            task = asyncio.create_task(place.worker.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _replaced(self, why: str) -> None:
        self.num_replaced += 1
        self._num_away += 1
        if self.on_replaced is not None:
            self.on_replaced(why)

    def _drop_dead(self) -> None:
        for place in [p for p in self._places if not p.worker.alive]:
            self._retire(place)
            self._replaced("its process is gone")

    async def _least_busy(self) -> _Place:
        self._drop_dead()
        if len(self._places) < self._num_workers and not self._closed:
            self._grow()
        while not self._places:  # the others carry on where there are any
            if self._closed:
                raise PartDied("the env workers are closed")
            growing = self._grow()
            await asyncio.wait([growing])
            if not growing.cancelled():
                growing.result()
        return min(self._places, key=lambda p: p.num_episodes)

    async def _start_one(self) -> None:
        self._places.append(_Place(await self._start_worker()))

    def _grow(self) -> asyncio.Task[None]:
        """Start what workers are missing; one task at a time does."""
        if self._growing is None or self._growing.done():
            self._growing = asyncio.create_task(self._start_missing(), name="start env workers")
            self._growing.add_done_callback(_heard)
        return self._growing

    async def _start_missing(self) -> None:
        """Start workers until there are enough.

        Raises:
            Exception: Why one could not be started, several times in a row.
        """
        num_failures = 0
        while len(self._places) < self._num_workers and not self._closed:
            try:
                await self._start_one()
            except Exception:
                num_failures += 1
                if num_failures > MAX_START_RETRIES:
                    raise
                await asyncio.sleep(RETRY_S * 2**num_failures)
                continue
            num_failures = 0
            if self._num_away:
                self._num_away -= 1
                if self.on_back is not None:
                    self.on_back()
            if len(self._places) > self._num_workers:  # shrunk meanwhile
                self._retire(self._places[-1])


def _heard(task: asyncio.Task[None]) -> None:
    """Mark an error as seen: who needs a worker starts the next attempt."""
    if not task.cancelled():
        task.exception()


class LocalWorker:
    """An env worker in this process, in the shape of a remote one."""

    def __init__(self, part: Any) -> None:
        """Wrap an :class:`rollart_core.rollout.env_worker.EnvWorker`."""
        self._part = part
        self.alive = True

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return await getattr(self._part, method)(*args, **kwargs)

    async def close(self) -> None:
        """End its environments."""
        self.alive = False
        await self._part.shutdown()
