"""The env workers of a run: assignment of episodes to workers, and replacement of lost workers.

Takes: a function that starts a worker. Gives: :meth:`EnvPool.episode`, one environment for one
episode, with its calls and the failure if its worker is lost. Never: sends an episode to a worker
with a hung thread (it is retired after its last episode), or keeps a task that repeatedly loses
workers among others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.errors import (
    CollateralFailure,
    EnvironmentFailure,
    EpisodeError,
    WorkerDied,
    WorkerLost,
)
from rollart_core.rollout.asyncio_tasks import cancel_and_wait, keep_until_done, retrieve_error
from rollart_core.rollout.env_answers import Observed
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.types import Task, Ticket

TaskKey: TypeAlias = tuple[str, str, int]

MAX_STRIKES: Final = 2
"""Number of strikes from which a task runs in a separate process."""
MAX_ENDED: Final = 2
"""Number of tasks that ended their separate processes from which their environment is kept
apart."""


class WorkerLosses:
    """Attributes lost workers to tasks and environments, and decides which ones to separate."""

    def __init__(self) -> None:
        self._strikes: Counter[TaskKey] = Counter()
        self._ended: dict[str, set[TaskKey]] = {}
        self._env_ids: set[str] = set()

    def see(self, task: Task) -> None:
        """Record that an environment is in use."""
        self._env_ids.add(task.env_id)

    def lost(self, in_call: Iterable[Task]) -> None:
        """Record that a shared worker was lost while these tasks had a call in progress."""
        keys = {_key(task) for task in in_call}
        for key in keys:
            self._strikes[key] += MAX_STRIKES if len(keys) == 1 else 1

    def ended_alone(self, task: Task) -> None:
        """Record that a process ended that ran only this task."""
        self._ended.setdefault(task.env_id, set()).add(_key(task))

    def survived(self, task: Task) -> None:
        """Record that an episode of a task finished in a separate process."""
        self._strikes.pop(_key(task), None)

    def needs_own_process(self, task: Task) -> bool:
        """Return whether the next episode of a task needs a separate process."""
        return self._strikes[_key(task)] >= MAX_STRIKES

    def is_kept_apart(self, env_id: str) -> bool:
        """Return whether an environment must not share a process with other environments."""
        return len(self._ended.get(env_id, ())) >= MAX_ENDED and len(self._env_ids) > 1


def _key(task: Task) -> TaskKey:
    return task.env_id, task.split, task.index


MAX_START_RETRIES = 2
"""Number of retries if a worker cannot be started."""
RETRY_S = 0.5
"""Seconds before the first retry; doubled before the second."""
MAX_OWN = 8
"""Maximum number of concurrent episodes in separate processes; further ones wait."""
T = TypeVar("T")
Answer: TypeAlias = Coroutine[Any, Any, T]
"""The awaitable result of a call on a worker."""
ANSWER_GRACE_S: Final = 5.0
"""Seconds that the pool waits for an answer beyond the worker's own deadline."""


class EnvWorkerHandle(Protocol):
    """An env worker, in this process or in another one."""

    @property
    def alive(self) -> bool:
        """False once the worker cannot answer any more."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of :class:`rollart_core.rollout.env_worker.EnvWorker`."""

    async def close(self) -> None:
        """Stop the worker and all its environments."""


@dataclass(frozen=True, slots=True)
class PhaseTimeouts:
    """Time limits of the calls, in seconds."""

    reset_s: float
    step_s: float
    close_s: float = 10.0


@dataclass(slots=True, eq=False)
class Place:
    """A worker and its current episodes."""

    worker: EnvWorkerHandle
    losses: WorkerLosses
    own_task: Task | None = None
    """The only task in this process; None if the process is shared."""
    retired: bool = False
    is_lost: bool = False
    episodes: set[EnvEpisode] = field(default_factory=set)

    def failure(self, what: str, error: WorkerDied) -> EpisodeError:
        """Return the failure of an episode whose call lost the worker."""
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
        """False once a call failed; then the environment is not reused."""
        self.is_agent = False
        """True after ``prepare``; then a program may block a separate thread."""
        self.in_call = False
        """True while a call is in progress on a worker that was alive at the start of the call."""

    def reset(self, env: EnvRef, ticket: Ticket) -> Answer[Observed]:
        """Start the ticket's task and return the first observation."""
        return self._call("reset", env, timeout_s=self._timeouts.reset_s, **_task_of(ticket))

    def step(self, action: str) -> Answer[Observed]:
        """Take one action in the environment."""
        return self._call("step", action, timeout_s=self._timeouts.step_s)

    def oracle(self) -> Answer[str | None]:
        """Return the expert's next action."""
        return self._call("oracle", timeout_s=self._timeouts.step_s)

    def random_action(self, key: int) -> Answer[str]:
        """Return the action of the random player for this key."""
        return self._call("random_action", key, timeout_s=self._timeouts.step_s)

    def prepare(self, env: EnvRef, ticket: Ticket) -> Answer[AgentStart]:
        """Start the ticket's agent task."""
        self.is_agent = True
        return self._call("prepare", env, timeout_s=self._timeouts.reset_s, **_task_of(ticket))

    def run(self, endpoint: Endpoint, *, timeout_s: float) -> Answer[None]:
        """Run the agent's program until it ends or is stopped."""
        return self._call("run", endpoint, timeout_s=timeout_s)

    def solve(self, *, timeout_s: float) -> Answer[None]:
        """Solve the task with its own ``solve``, in place of the agent's program."""
        return self._call("solve", timeout_s=timeout_s)

    async def stop(self, *, timeout_s: float) -> None:
        """Stop the agent's program; then ``run`` returns."""
        async with TimeLimit("agent.stop", timeout_s):
            try:
                await self._worker.call("stop", self._id)
            except WorkerDied as e:
                raise self._place.failure("agent.stop", e) from e

    def finish(self, recorded: Recorded) -> Answer[AgentResult]:
        """Judge the result of the agent's program."""
        return self._call("finish", recorded, timeout_s=self._timeouts.step_s)

    async def end(self) -> None:
        """Release the environment; never raises."""
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


class EnvPool:
    """All env workers of a run; their number may change during the run."""

    def __init__(
        self, start_worker: Callable[[], Awaitable[EnvWorkerHandle]], *, num_workers: int
    ) -> None:
        """Describe the pool; ``start`` starts the workers."""
        self._start_worker = start_worker
        self._num_workers = num_workers
        self._places: list[Place] = []
        self._losses = WorkerLosses()
        self._own = asyncio.Semaphore(MAX_OWN)
        self._apart: dict[str, Place] = {}
        self._starting_apart = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._growing: asyncio.Task[None] | None = None
        self._closed = False
        self._numbers = itertools.count()
        self.num_replaced = 0
        self.on_replaced: Callable[[str], None] | None = None
        """Called with the reason whenever a worker is replaced."""
        self.on_back: Callable[[], None] | None = None
        """Called whenever the replacement of a worker is up."""
        self._num_away = 0

    @property
    def num_workers(self) -> int:
        """The target number of workers."""
        return self._num_workers

    @property
    def num_episodes(self) -> int:
        """The number of running episodes."""
        return sum(len(place.episodes) for place in (*self._places, *self._apart.values()))

    async def start(self) -> None:
        """Start all workers.

        Raises:
            Exception: The error of a worker that could not be started; the others stay up until
                ``close``.
        """
        starts = (self._start_one() for _ in range(self._num_workers))
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def resize(self, num_workers: int) -> None:
        """Scale to this number of workers; return when new workers are up.

        The least busy workers leave: they get no more episodes and stop after their last one.

        Raises:
            ValueError: If the number is less than one.
        """
        if num_workers < 1:
            raise ValueError(f"{num_workers} env workers: at least 1 is needed")
        self._num_workers = num_workers
        self._drop_dead()
        while len(self._places) > num_workers:
            self._retire(min(self._places, key=lambda p: len(p.episodes)))
        if len(self._places) < num_workers:
            await asyncio.shield(self._grow())

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on any worker."""
        return await (await self._least_busy()).worker.call(method, *args, **kwargs)

    @asynccontextmanager
    async def episode(
        self, episode_id: str, timeouts: PhaseTimeouts, task: Task | None = None
    ) -> AsyncIterator[EnvEpisode]:
        """Lease an environment for one episode; it is released at the end in any case.

        Args:
            episode_id: The id of the episode.
            timeouts: The time limits of its calls.
            task: The task; after losses it may get a separate process.
        """
        if task is not None:
            self._losses.see(task)
        own = task is not None and self._losses.needs_own_process(task)
        async with self._own if own else nullcontext():
            place = await self._place(task, own)
            # Ids repeat in evaluations, and workers remember ends that arrive before beginnings.
            name = f"{episode_id}~{next(self._numbers)}"
            episode = EnvEpisode(place, name, timeouts, task)
            place.episodes.add(episode)
            try:
                yield episode
                if place.own_task is not None:
                    self._losses.survived(place.own_task)
            except BaseException:
                episode.clean = False
                raise
            finally:
                await asyncio.shield(asyncio.ensure_future(self._take_back(place, episode)))

    async def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        await cancel_and_wait(self._growing)
        places, self._places = [*self._places, *self._apart.values()], []
        self._apart.clear()
        await asyncio.gather(*(p.worker.close() for p in places), *self._closing)

    async def _take_back(self, place: Place, episode: EnvEpisode) -> None:
        if not episode.clean:
            await self._inspect(place)
        if place.worker.alive:
            await episode.end()
            if episode.is_agent and not episode.clean:  # a hang is detected only at the end
                await self._inspect(place)
        place.episodes.discard(episode)
        if place.retired:
            self._close_if_idle(place)

    async def _inspect(self, place: Place) -> None:
        """Retire a worker that is dead, does not answer, or has a hung thread."""
        if place.retired:
            return
        try:
            async with asyncio.timeout(ANSWER_GRACE_S):
                hung = await place.worker.call("num_hung")
            why = f"{hung} of its threads hang"
        except TimeoutError:
            hung, why = 1, "it does not answer"
        except WorkerDied as e:
            hung, why = 1, str(e)
        if hung and not place.retired:
            is_counted = place in self._places
            self._retire(place)
            if is_counted:
                self._replaced(why)

    def _retire(self, place: Place) -> None:
        """Exclude a worker from new episodes; close it after its last one."""
        place.retired = True
        if place in self._places:
            self._places.remove(place)
        for env_id in [name for name, apart in self._apart.items() if apart is place]:
            del self._apart[env_id]
        self._close_if_idle(place)

    def _close_if_idle(self, place: Place) -> None:
        if len(place.episodes) == 0:
            keep_until_done(asyncio.create_task(place.worker.close()), self._closing)

    def _replaced(self, why: str) -> None:
        self.num_replaced += 1
        self._num_away += 1
        if self.on_replaced is not None:
            self.on_replaced(why)

    def _drop_dead(self) -> None:
        for place in [p for p in self._places if not p.worker.alive]:
            self._retire(place)
            self._replaced("its process is gone")

    async def _place(self, task: Task | None, own: bool) -> Place:
        """Return the worker of the next episode: a shared one, unless losses require another."""
        if task is not None and own:
            with suppress(WorkerDied):
                return Place(await self._start_worker(), self._losses, task, retired=True)
        if task is not None and self._losses.is_kept_apart(task.env_id):
            async with self._starting_apart:
                place = self._apart.get(task.env_id)
                if place is None or not place.worker.alive:
                    place = Place(await self._start_worker(), self._losses)
                    self._apart[task.env_id] = place
            return place
        return await self._least_busy()

    async def _least_busy(self) -> Place:
        self._drop_dead()
        if len(self._places) < self._num_workers and not self._closed:
            self._grow()
        while not self._places:  # if other workers are left, they take the episode
            if self._closed:
                raise WorkerDied("the env workers are closed")
            growing = self._grow()
            await asyncio.wait([growing])
            if not growing.cancelled():
                growing.result()
        return min(self._places, key=lambda p: len(p.episodes))

    async def _start_one(self) -> None:
        self._places.append(Place(await self._start_worker(), self._losses))

    def _grow(self) -> asyncio.Task[None]:
        """Start the missing workers in one background task."""
        if self._growing is None or self._growing.done():
            self._growing = asyncio.create_task(self._start_missing(), name="start env workers")
            self._growing.add_done_callback(retrieve_error)
        return self._growing

    async def _start_missing(self) -> None:
        """Start workers until there are enough.

        Raises:
            Exception: The error of a worker that could not be started several times in a row.
        """
        from tenacity import AsyncRetrying, stop_after_attempt, wait_exponential

        async def start_missing_one() -> bool:
            if is_missing := len(self._places) < self._num_workers and not self._closed:
                await self._start_one()
            return is_missing

        retrying = AsyncRetrying(
            sleep=asyncio.sleep,
            stop=stop_after_attempt(MAX_START_RETRIES + 1),
            wait=wait_exponential(multiplier=RETRY_S),
            reraise=True,
        )
        while await retrying(start_missing_one):
            if self._num_away:
                self._num_away -= 1
                if self.on_back is not None:
                    self.on_back()
            if len(self._places) > self._num_workers:  # scaled down meanwhile
                self._retire(self._places[-1])


def _task_of(ticket: Ticket) -> dict[str, Any]:
    """Return the arguments that start the task of a ticket."""
    task = ticket.task
    return {"seed": task.seed, "options": {"task": task.index, "split": task.split}}


class LocalWorker:
    """An env worker in this process, with the interface of a remote one."""

    def __init__(self, part: Any) -> None:
        """Wrap an :class:`rollart_core.rollout.env_worker.EnvWorker`."""
        self._part = part
        self.alive = True

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker."""
        return await getattr(self._part, method)(*args, **kwargs)

    async def close(self) -> None:
        """Close its environments."""
        self.alive = False
        await self._part.shutdown()
