"""The env worker, which holds many environments, runs their calls and validates the results.

Takes: reset, step and end for an episode id, or for an agent task prepare, run, stop and finish.
Gives: :class:`Observed`, or an EpisodeError with the name of the failed call. Never: lets one
environment block or corrupt another, or outlive its episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from rollart_core.contracts.agent import (
    AgentResult,
    AgentStart,
    AgentTask,
    Endpoint,
    HasSolution,
    Recorded,
)
from rollart_core.errors import (
    CancelledFailure,
    EnvironmentFailure,
    boundary,
    contained,
    is_from_outside,
)
from rollart_core.rollout.env_answers import Observed, agent_result, cut, observed
from rollart_core.rollout.loop import LoopThread
from rollart_core.rollout.random_player import drawn_action
from rollart_core.rollout.threads import DaemonThreads
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.rollout.tools.tool_set import checked_tools
from rollart_core.types import Observation

T = TypeVar("T")


class AgentHost:
    """One agent task and its thread.

    The env worker's loop awaits the coroutines of the task. A program may block in them, for
    example with a blocking client, so each task has its own event loop in a daemon thread.

    Args:
        task: The task; no other object calls it.
    """

    def __init__(self, task: AgentTask) -> None:
        self._task = task
        self._loop = LoopThread("agent")
        self._program: Future[None] | None = None
        self._is_stopped = False
        self._is_given_up = False

    @property
    def can_solve(self) -> bool:
        """Whether the task has a ``solve`` method."""
        return callable(getattr(self._task, "solve", None))

    @property
    def hangs(self) -> bool:
        """True while the task blocks its thread after it was cancelled."""
        return self._is_given_up and self._loop.is_alive

    async def prepare(self, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Start an episode."""
        start = await self._await(lambda: self._task.prepare(seed=seed, options=options))
        if not isinstance(start, AgentStart):
            raise TypeError(f"prepare must return AgentStart, not {type(start).__name__}")
        return start

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program until it ends or :meth:`stop` ends it."""
        self._is_stopped = False
        self._program = self._loop.submit(_called(lambda: self._task.run(endpoint)))
        try:
            await asyncio.wrap_future(self._program)
        except (Exception, asyncio.CancelledError):
            me = asyncio.current_task()
            if not self._is_stopped or (me is not None and me.cancelling()):
                raise
        finally:
            self._program = None

    async def solve(self) -> None:
        """Solve the task with its own ``solve``, in place of the program.

        Raises:
            TypeError: If the task has no ``solve`` method.
        """
        if not self.can_solve:
            raise TypeError(f"{type(self._task).__name__} has no solve()")
        task = cast("HasSolution", self._task)
        await self._await(task.solve)

    async def stop(self) -> None:
        """Stop the program, if it is running, and wait for its end.

        Raises:
            EnvironmentFailure: If it does not end.
        """
        if self._program is None:
            return
        self._is_stopped = True
        if not await self.quiet():
            raise EnvironmentFailure("the program does not end", boundary="agent.stop")

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Judge the episode."""
        result = await self._await(lambda: self._task.finish(recorded))
        if not isinstance(result, AgentResult):
            raise TypeError(f"finish must return AgentResult, not {type(result).__name__}")
        return result

    async def quiet(self) -> bool:
        """Cancel all tasks of the thread and wait; return False if they do not end."""
        has_ended = await self._loop.end_tasks()
        self._is_given_up |= not has_ended
        return has_ended

    def close(self) -> None:
        """Close the task and end the thread; blocks until the task is closed."""
        try:
            self._task.close()
        finally:
            self._loop.close()

    async def _await(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._loop.wait(_called(call))


async def _called(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Make the call in the thread, because a plain function may block or raise in it."""
    try:
        return await call()
    except BaseException as e:
        if is_from_outside(e):
            raise
        raise contained(e) from e  # sys.exit in a program ends only the program


CLOSE_S: Final = 5.0
"""Default limit for closing an environment, in seconds."""
NUM_EARLY_ENDS: Final = 256
"""Number of remembered episode ends that arrived before their beginnings."""


@dataclass(slots=True)
class EpisodeCalls:
    """The running calls of one episode; its end cancels them and waits for them.

    If a caller in another process stops waiting for a call, the call still counts as running.
    """

    has_ended: bool = False
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Run a block, which the end of the episode cancels.

        Raises:
            CancelledFailure: If the episode ends before the block.
        """
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self.running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.has_ended and task.uncancel() <= before:  # no other cancellation
                raise end_failure(what) from None
            raise
        finally:
            self.running.discard(task)
            if not self.running:
                self._quiet.set()

    async def end(self, timeout_s: float) -> None:
        """Cancel running calls, and wait at most ``timeout_s`` for their end."""
        self.has_ended = True
        if not self.running:
            return
        self._quiet.clear()
        for task in self.running:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()


def end_failure(what: str) -> CancelledFailure:
    """Return the failure of a call whose episode has ended."""
    return CancelledFailure("the episode has ended", boundary=what)


@dataclass(frozen=True, slots=True)
class EnvRef:
    """An environment's id and options, which each worker resolves itself."""

    id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A key that is equal for interchangeable environments."""
        return f"{self.id} {sorted(self.options.items())!r}"


@dataclass(slots=True)
class _EnvSlot:
    """One environment, with its state between calls."""

    env: Any
    key: str
    agent: AgentHost | None = None
    """The host of an agent task; None for an environment with ``step``."""
    shown: tuple[Observation, Mapping[str, Any]] = ("", {})
    """The last observation and info, for the random player; the info keeps the tools."""


@dataclass(slots=True)
class _Episode(EpisodeCalls):
    """One episode: its running calls, and its environment once it has one."""

    slot: _EnvSlot | None = None


class EnvWorker:
    """Holds the environments of many episodes; see the module docstring."""

    def __init__(self, *, num_threads: int = 64, max_observation_chars: int = 20_000) -> None:
        """Create a worker without environments.

        Args:
            num_threads: Maximum number of concurrent blocking calls of environments.
            max_observation_chars: Maximum length; longer observations are cut in the middle.
        """
        self._threads = DaemonThreads(num_threads)
        self._closers = DaemonThreads(None, name="env-close")
        self._max_chars = max_observation_chars
        self._episodes: dict[str, _Episode] = {}
        self._early_ends: deque[str] = deque(maxlen=NUM_EARLY_ENDS)
        self._idle: dict[str, list[_EnvSlot]] = {}
        self._hung: list[AgentHost] = []

    async def reset(
        self,
        episode_id: str,
        env: EnvRef,
        *,
        seed: int,
        options: Mapping[str, Any],
        timeout_s: float,
    ) -> Observed:
        """Start an episode in an idle or a new environment.

        Raises:
            EnvironmentFailure: If creation or ``reset`` raised or returned an invalid result.
            DeadlineFailure: After ``timeout_s``.
            CancelledFailure: If the episode ends first.
        """
        episode = self._begun(episode_id, "env.reset")
        async with TimeLimit("env.reset", timeout_s):
            with episode.call("env.reset"), boundary(EnvironmentFailure, "env.reset"):
                slot = await self._slot_of(episode, env, "env.reset")
                answer = await self._call(slot.env, "reset", seed=seed, options=dict(options))
                if not isinstance(answer, tuple) or len(answer) != 2:
                    raise TypeError("reset must return (observation, info)")
                first = observed(
                    answer[0], 0.0, (False, False), answer[1], max_chars=self._max_chars
                )
                tools = answer[1].get("tools")
                slot.shown = first.observation, answer[1]
                return replace(first, tools=checked_tools(tools)) if tools else first

    async def step(self, episode_id: str, action: str, *, timeout_s: float) -> Observed:
        """Take one action in an episode.

        Raises:
            EnvironmentFailure: If ``step`` raised or returned an invalid result, such as a NaN
                reward.
            DeadlineFailure: After ``timeout_s``.
            CancelledFailure: If the episode ends first; the same holds for the methods below.
        """
        episode, slot = self._under_way(episode_id, "env.step")
        async with TimeLimit("env.step", timeout_s):
            with episode.call("env.step"), boundary(EnvironmentFailure, "env.step"):
                answer = await self._call(slot.env, "step", action)
                if not isinstance(answer, tuple) or len(answer) != 5:
                    raise TypeError(
                        "step must return (observation, reward, terminated, truncated, info)"
                    )
                observation, reward, terminated, truncated, info = answer
                found = observed(
                    observation,
                    reward,
                    (terminated, truncated),
                    info,
                    max_chars=self._max_chars,
                )
                slot.shown = found.observation, _with_tools(info, slot.shown[1])
                return found

    async def oracle(self, episode_id: str, *, timeout_s: float) -> str | None:
        """Return the expert's next action in an episode; None if it has none.

        Raises:
            EnvironmentFailure: If the environment has no ``oracle()``, or it raised.
            DeadlineFailure: After ``timeout_s``.
        """
        episode, slot = self._under_way(episode_id, "env.oracle")
        async with TimeLimit("env.oracle", timeout_s):
            with episode.call("env.oracle"), boundary(EnvironmentFailure, "env.oracle"):
                if not callable(getattr(slot.env, "oracle", None)):
                    raise TypeError(f"{type(slot.env).__name__} has no oracle() to learn from")
                action = await self._threads.run(lambda: slot.env.oracle())
                return None if action is None else str(action)

    async def random_action(self, episode_id: str, key: int, *, timeout_s: float) -> str:
        """Return the action of the random player; see ``random_player``.

        Raises:
            EnvironmentFailure: If no action can be drawn.
            DeadlineFailure: After ``timeout_s``.
        """
        _, slot = self._under_way(episode_id, "env.random_action")
        async with TimeLimit("env.random_action", timeout_s):
            with boundary(EnvironmentFailure, "env.random_action"):
                return drawn_action(slot.env, *slot.shown, key)

    async def has_oracle(self, env: EnvRef) -> bool:
        """Return whether an environment has an expert."""
        slot = await self._slot(env)
        self._idle.setdefault(slot.key, []).append(slot)
        if slot.agent is not None:
            return slot.agent.can_solve
        return callable(getattr(slot.env, "oracle", None))

    async def prepare(
        self,
        episode_id: str,
        env: EnvRef,
        *,
        seed: int,
        options: Mapping[str, Any],
        timeout_s: float,
    ) -> AgentStart:
        """Start an episode of an agent task, in an idle or a new one.

        Raises:
            EnvironmentFailure: If creation or ``prepare`` raised or returned an invalid result, or
                the environment is not an agent task.
            DeadlineFailure: After ``timeout_s``.
        """
        episode = self._begun(episode_id, "agent.prepare")
        async with TimeLimit("agent.prepare", timeout_s):
            with episode.call("agent.prepare"), boundary(EnvironmentFailure, "agent.prepare"):
                slot = await self._slot_of(episode, env, "agent.prepare")
                if slot.agent is None:
                    raise TypeError(f"{env.id} is not an agent task: no prepare, run and finish")
                start = await slot.agent.prepare(seed, dict(options))
                text, _ = cut(str(start.prompt), self._max_chars)
                return AgentStart(text.encode("utf-8", "replace").decode())

    async def run(self, episode_id: str, endpoint: Endpoint, *, timeout_s: float) -> None:
        """Run the program of an episode until it ends or :meth:`stop` ends it.

        Raises:
            EnvironmentFailure: If the program raised.
            DeadlineFailure: After ``timeout_s``; then ``end`` stops the program.
        """
        episode, agent = self._agent(episode_id, "agent.run")
        async with TimeLimit("agent.run", timeout_s):
            with episode.call("agent.run"), boundary(EnvironmentFailure, "agent.run"):
                await agent.run(endpoint)

    async def solve(self, episode_id: str, *, timeout_s: float) -> None:
        """Solve the task of an episode with its own ``solve``, in place of the program.

        Raises:
            EnvironmentFailure: If the task has no ``solve()``, or it raised.
            DeadlineFailure: After ``timeout_s``.
        """
        episode, agent = self._agent(episode_id, "agent.solve")
        async with TimeLimit("agent.solve", timeout_s):
            with episode.call("agent.solve"), boundary(EnvironmentFailure, "agent.solve"):
                await agent.solve()

    async def stop(self, episode_id: str) -> None:
        """Stop the program of an episode; then its ``run`` returns.

        Raises:
            EnvironmentFailure: If the program does not end.
        """
        _, agent = self._agent(episode_id, "agent.stop")
        await agent.stop()

    async def finish(self, episode_id: str, recorded: Recorded, *, timeout_s: float) -> AgentResult:
        """Judge the result of an episode's program.

        Raises:
            EnvironmentFailure: If ``finish`` raised or returned an invalid result, such as a NaN
                reward.
            DeadlineFailure: After ``timeout_s``.
        """
        episode, agent = self._agent(episode_id, "agent.finish")
        async with TimeLimit("agent.finish", timeout_s):
            with episode.call("agent.finish"), boundary(EnvironmentFailure, "agent.finish"):
                return agent_result(await agent.finish(recorded))

    async def end(self, episode_id: str, *, reusable: bool, timeout_s: float = 10.0) -> None:
        """End an episode; its environment becomes idle, or is closed if not ``reusable``.

        A running call is cancelled, and later calls fail.
        """
        episode = self._episodes.pop(episode_id, None)
        if episode is None:
            self._early_ends.append(episode_id)
            return
        is_idle = not episode.running
        await episode.end(timeout_s)
        if episode.slot is None:
            return
        if reusable and is_idle:
            self._idle.setdefault(episode.slot.key, []).append(episode.slot)
            return
        await self._close(episode.slot, timeout_s)

    async def shutdown(self) -> None:
        """Close every environment; errors and hangs of one do not affect the others."""
        idle = [slot for slots in self._idle.values() for slot in slots]
        self._idle.clear()
        ends = (self.end(name, reusable=False, timeout_s=CLOSE_S) for name in [*self._episodes])
        await asyncio.gather(*ends, *(self._close(slot, CLOSE_S) for slot in idle))
        if self._threads.num_unwanted:
            await self._closers.run(lambda: self._threads.wait_disposed(CLOSE_S))
        self._threads.close()
        self._closers.close()

    async def num_hung(self) -> int:
        """Return the number of threads that are blocked in an abandoned call."""
        self._hung = [agent for agent in self._hung if agent.hangs]
        return self._threads.num_hung + self._closers.num_hung + len(self._hung)

    async def is_agent(self, env: EnvRef) -> bool:
        """Return whether an environment is an agent task."""
        slot = await self._slot(env)
        self._idle.setdefault(slot.key, []).append(slot)
        return slot.agent is not None

    async def num_tasks(self, env: EnvRef, split: str) -> int | None:
        """Return the number of tasks in a split; None if it has no end."""
        slot = await self._slot(env)
        try:
            count = getattr(slot.env, "num_tasks", None)
            with boundary(EnvironmentFailure, "env.num_tasks"):
                return None if count is None else await self._threads.run(lambda: count(split))
        finally:
            self._idle.setdefault(slot.key, []).append(slot)

    async def task_clusters(self, env: EnvRef, split: str) -> list[str] | None:
        """Return the cluster name of each task of a split; None if there are no clusters."""
        slot = await self._slot(env)
        try:
            names = getattr(slot.env, "task_clusters", None)
            with boundary(EnvironmentFailure, "env.task_clusters"):
                found = None if names is None else await self._threads.run(lambda: names(split))
                return None if found is None else [str(name) for name in found]
        finally:
            self._idle.setdefault(slot.key, []).append(slot)

    async def _slot(self, env: EnvRef) -> _EnvSlot:
        idle = self._idle.get(env.key)
        if idle:
            return idle.pop()
        with boundary(EnvironmentFailure, "making the environment"):
            made = await self._made(env)
            return _EnvSlot(made, env.key, AgentHost(made) if isinstance(made, AgentTask) else None)

    def _begun(self, episode_id: str, what: str) -> _Episode:
        if episode_id in self._early_ends:
            self._early_ends.remove(episode_id)
            raise end_failure(what)
        return self._episodes.setdefault(episode_id, _Episode())

    async def _slot_of(self, episode: _Episode, env: EnvRef, what: str) -> _EnvSlot:
        """Return the environment of a starting episode, unless the episode has ended meanwhile."""
        slot = await self._slot(env)
        if episode.has_ended:  # its end did not wait for this environment
            await self._close(slot, CLOSE_S)
            raise end_failure(what)
        episode.slot = slot
        return slot

    def _under_way(self, episode_id: str, what: str) -> tuple[_Episode, _EnvSlot]:
        episode = self._episodes.get(episode_id)
        if episode is None or episode.slot is None:
            raise EnvironmentFailure(f"no episode {episode_id}", boundary=what)
        return episode, episode.slot

    def _agent(self, episode_id: str, what: str) -> tuple[_Episode, AgentHost]:
        episode, slot = self._under_way(episode_id, what)
        if slot.agent is None:
            raise EnvironmentFailure(f"no episode {episode_id} of an agent", boundary=what)
        return episode, slot.agent

    async def _made(self, env: EnvRef) -> Any:
        from rollart_core.plugins.registry import ISOLATION, make, sandbox_service

        if ISOLATION in env.options:  # awaited without a thread, which could not be killed
            return await sandbox_service().open(env.id, env.options)
        return await self._threads.run(
            lambda: make(env.id, **env.options), unwanted=lambda made: made.close()
        )

    def _call(self, env: Any, name: str, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call a method of an environment: its async variant if it has one, else on a thread."""
        coroutine = getattr(env, f"a{name}", None)
        if coroutine is not None and inspect.iscoroutinefunction(coroutine):
            return cast("Awaitable[Any]", coroutine(*args, **kwargs))
        return self._threads.run(partial(getattr(env, name), *args, **kwargs))

    async def _close(self, slot: _EnvSlot, timeout_s: float) -> None:
        agent = slot.agent
        if agent is not None and not await agent.quiet():
            self._hung.append(agent)
        close = slot.env.close if agent is None else agent.close
        with contextlib.suppress(Exception):  # a failed close is not retried
            async with asyncio.timeout(timeout_s):
                await self._closers.run(close)


def _with_tools(info: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the info with the tools of the episode, which only the info of the reset has."""
    tools = before.get("tools")
    return {**info, "tools": tools} if tools else info
