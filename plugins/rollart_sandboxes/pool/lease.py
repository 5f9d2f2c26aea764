"""Base classes for code that acts in a sandbox: one sandbox per episode, always returned.

:class:`SandboxEnv` is for environments. A subclass has the coroutines ``begin`` and ``act``. The
class has gymnasium's ``reset`` and ``step``, and ``areset`` and ``astep`` for async workers.

:class:`SandboxAgent` is for agent tasks whose program is a command in a sandbox. A subclass has the
coroutines ``begin``, ``command`` and ``judge``. The class has the contract of
:class:`rollart_core.contracts.agent.AgentTask`.

    begin -> [a port of the sandbox connects to the endpoint: the command runs] -> judge

The program gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``. The address is one of
the sandbox's loopback, from which the sandbox connects to the gateway and nowhere else.

Takes: a source of sandboxes. Gives: a sandbox to act in. Never: keeps it after a failed call, or
after ``close``; gives an agent's sandbox a network, or lets its program or the program's children
continue after its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import gymnasium

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import EnvironmentFailure
from rollart_core.rollout import loop
from rollart_core.spaces import Text
from rollart_core.types import Observation
from rollart_sandboxes.pool.source import SandboxSource

T = TypeVar("T")


class SandboxLease:
    """The sandbox of the current episode, with its creation and release.

    Args:
        sandboxes: The source of sandboxes; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, sandboxes: SandboxSource) -> None:
        self._sandboxes = sandboxes
        self._sandbox: Sandbox | None = None

    async def open_sandbox(self, **needs: object) -> Sandbox:
        """Return the last episode's sandbox and take a new one, as ``SandboxSource.take`` does."""
        await self._give_back()
        self._sandbox = await self._sandboxes.take(**needs)
        return self._sandbox

    def close(self) -> None:
        """Return the sandbox, and release the pool; may be called twice."""
        loop.run(self._let_go())

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``; return the sandbox to the pool if it fails."""
        try:
            return await work
        except BaseException:
            await self._give_back()
            raise

    async def _let_go(self) -> None:
        try:
            await self._give_back()
        finally:
            await self._sandboxes.close()

    async def _give_back(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._sandboxes.give_back(sandbox)


Reset = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class SandboxEnv(SandboxLease, gymnasium.Env[Observation, str]):
    """An environment with one sandbox per episode.

    Args:
        sandboxes: The source of sandboxes; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, sandboxes: SandboxSource) -> None:
        super().__init__(sandboxes)
        self.observation_space = Text()
        self.action_space = Text()

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox of the current episode; None before the first one and after its end."""
        return self._sandbox

    @property
    def box(self) -> Sandbox | None:
        """The previous name of ``sandbox``. It is removed in 0.3."""
        return self.sandbox

    @abstractmethod
    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        """Begin an episode; ``open_sandbox`` returns its sandbox."""

    @abstractmethod
    async def act(self, action: str) -> Step:
        """Act in the episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode, and wait for it."""
        super().reset(seed=seed)
        return loop.run(self._kept(self.begin(seed, options or {})))

    def step(self, action: str) -> Step:
        """Act, and wait for the result."""
        return loop.run(self._kept(self.act(action)))

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Reset:
        """Begin an episode."""
        super().reset(seed=seed)
        return await loop.on_loop(self._kept(self.begin(seed, options or {})))

    async def astep(self, action: str) -> Step:
        """Act."""
        return await loop.on_loop(self._kept(self.act(action)))


_TAIL: Final = 4000
"""Bytes of a failed program's output that its failure contains."""
_NO_PROXY: Final = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


@dataclass(frozen=True, slots=True)
class Command:
    """A program, as the sandbox runs it."""

    argv: Sequence[str]
    timeout_s: float
    """Time limit. The program is then killed, and its result is judged as truncated."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the sandbox's own and those of the endpoint."""
    cwd: str | None = None


class SandboxAgent(SandboxLease, ABC):
    """An agent task with one sandbox per episode.

    Args:
        sandboxes: The source of sandboxes; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, sandboxes: SandboxSource) -> None:
        super().__init__(sandboxes)
        self.ended: ExecResult | None = None
        """How the program of the current episode ended; None before that."""

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the current episode."""
        if self._sandbox is None:
            raise RuntimeError("there is no sandbox: call prepare() first, and not after finish()")
        return self._sandbox

    @property
    def box(self) -> Sandbox:
        """The previous name of ``sandbox``. It is removed in 0.3."""
        return self.sandbox

    @abstractmethod
    async def begin(self, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Choose the task, ``open_sandbox``, and write what the program needs into it."""

    @abstractmethod
    async def command(self, endpoint: Endpoint) -> Command:
        """Return the program.

        Args:
            endpoint: The endpoint, with its address inside the sandbox.
        """

    @abstractmethod
    async def judge(self, recorded: Recorded) -> AgentResult:
        """Judge what the program has left in the sandbox; no process runs there any more."""

    async def prepare(self, *, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Begin an episode."""
        self.ended = None
        return await loop.on_loop(self._kept(self.begin(seed, options)))

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program.

        Raises:
            EnvironmentFailure: If its exit code is not 0.
        """
        await loop.on_loop(self._run(endpoint))

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Judge, and return the sandbox."""
        result = await loop.on_loop(self._kept(self.judge(recorded)))
        await loop.on_loop(self._give_back())
        if self.ended is not None and self.ended.timed_out:
            return replace(result, truncated=True)
        return result

    async def _run(self, endpoint: Endpoint) -> None:
        url = urlsplit(endpoint.base_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        inside = await self.sandbox.forward_port(f"{url.hostname}:{port}")
        base_url = url._replace(netloc=inside).geturl()
        endpoint = replace(endpoint, base_url=base_url)
        command = await self.command(endpoint)
        self.ended = ended = await self.sandbox.exec(
            command.argv,
            timeout_s=command.timeout_s,
            cwd=command.cwd,
            env={**_NO_PROXY, **command.env, **endpoint.environ()},
        )
        if ended.exit_code != 0 and not ended.timed_out:
            raise _failed(command, ended)


def _failed(command: Command, ended: ExecResult) -> EnvironmentFailure:
    said = (ended.stdout[-_TAIL:] + b"\n" + ended.stderr[-_TAIL:]).decode(errors="replace").strip()
    last = said.splitlines()[-1] if said else "without output"
    message = f"{command.argv[0]} ended with exit code {ended.exit_code}: {last[:300]}"
    return EnvironmentFailure(message, boundary="agent.run", detail=said)
