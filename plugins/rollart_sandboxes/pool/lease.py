"""The bases of what acts in a box: one sandbox an episode, returned however that ends.

:class:`SandboxEnv` is for environments, with coroutines ``begin`` and ``act`` of a subclass: it has
gymnasium's ``reset`` and ``step``, and ``areset`` and ``astep`` for workers that await.

:class:`SandboxAgent` is for agent tasks whose program is a command in a box, with coroutines
``begin``, ``command`` and ``judge`` of a subclass; it has the contract of
:class:`rollart_core.contracts.agent.AgentTask`.

    begin -> [the box's own port leads to the endpoint: the command runs] -> judge

The program is told by ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``. Its address is
one of the box's own loopback, from where the sandbox leads to the gateway and nowhere else.

Takes: a source of boxes. Gives: a box to act in. Never: keeps it after a failed call, or past
``close``; gives an agent's box a network, or lets its program or what that has started run on past
its end.
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
    """The box of the present episode, and how it comes and goes.

    Args:
        boxes: Where boxes come from; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, boxes: SandboxSource) -> None:
        self._boxes = boxes
        self._box: Sandbox | None = None

    async def open_sandbox(self, **needs: object) -> Sandbox:
        """Give back the box of the last episode and take a fresh one, as ``SandboxSource.take``."""
        await self._give_back()
        self._box = await self._boxes.take(**needs)
        return self._box

    def close(self) -> None:
        """Give the box back, and let go of the pool; may be called twice."""
        loop.run(self._let_go())

    async def _kept(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``; the box does not outlive its failure."""
        try:
            return await work
        except BaseException:
            await self._give_back()
            raise

    async def _let_go(self) -> None:
        try:
            await self._give_back()
        finally:
            await self._boxes.close()

    async def _give_back(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await self._boxes.give_back(box)


Reset = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class SandboxEnv(SandboxLease, gymnasium.Env[Observation, str]):
    """An environment whose episodes each happen in a box of their own.

    Args:
        boxes: Where boxes come from; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, boxes: SandboxSource) -> None:
        super().__init__(boxes)
        self.observation_space = Text()
        self.action_space = Text()

    @property
    def box(self) -> Sandbox | None:
        """The box of the present episode; None before the first one and after its end."""
        return self._box

    @abstractmethod
    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        """Begin an episode; ``open_sandbox`` gives it its box."""

    @abstractmethod
    async def act(self, action: str) -> Step:
        """Act in the episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode, and wait for it."""
        super().reset(seed=seed)
        return loop.run(self._kept(self.begin(seed, options or {})))

    def step(self, action: str) -> Step:
        """Act, and wait for what comes of it."""
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
"""Bytes of a failed program's output that its failure keeps."""
_NO_PROXY: Final = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


@dataclass(frozen=True, slots=True)
class Command:
    """A program, as the box runs it."""

    argv: Sequence[str]
    timeout_s: float
    """After this long it is killed, and what it has left is judged, as truncated."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides the box's own and those that name the endpoint."""
    cwd: str | None = None


class SandboxAgent(SandboxLease, ABC):
    """An agent task whose episodes each happen in a box of their own.

    Args:
        boxes: Where boxes come from; ``sandbox_source(options.sandbox)`` makes one.
    """

    def __init__(self, boxes: SandboxSource) -> None:
        super().__init__(boxes)
        self.ended: ExecResult | None = None
        """How the program of the present episode ended, once it has."""

    @property
    def box(self) -> Sandbox:
        """The box of the present episode."""
        if self._box is None:
            raise RuntimeError("there is no box: prepare() first, and not after finish()")
        return self._box

    @abstractmethod
    async def begin(self, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Choose the task, ``open_sandbox``, and put into it what the program needs."""

    @abstractmethod
    async def command(self, endpoint: Endpoint) -> Command:
        """Return the program.

        Args:
            endpoint: As the program is to reach it, in the box.
        """

    @abstractmethod
    async def judge(self, recorded: Recorded) -> AgentResult:
        """Judge what the program has left in the box; nothing runs there any more."""

    async def prepare(self, *, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Begin an episode."""
        self.ended = None
        return await loop.on_loop(self._kept(self.begin(seed, options)))

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program.

        Raises:
            EnvironmentFailure: When its exit code is not 0.
        """
        await loop.on_loop(self._run(endpoint))

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Judge, and give the box back."""
        result = await loop.on_loop(self._kept(self.judge(recorded)))
        await loop.on_loop(self._give_back())
        if self.ended is not None and self.ended.timed_out:
            return replace(result, truncated=True)
        return result

    async def _run(self, endpoint: Endpoint) -> None:
        url = urlsplit(endpoint.base_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        inside = await self.box.forward_port(f"{url.hostname}:{port}")
        base_url = url._replace(netloc=inside).geturl()
        endpoint = replace(endpoint, base_url=base_url)
        command = await self.command(endpoint)
        self.ended = ended = await self.box.exec(
            command.argv,
            timeout_s=command.timeout_s,
            cwd=command.cwd,
            env={**_NO_PROXY, **command.env, **endpoint.environ()},
        )
        if ended.exit_code != 0 and not ended.timed_out:
            raise _failed(command, ended)


def _failed(command: Command, ended: ExecResult) -> EnvironmentFailure:
    said = (ended.stdout[-_TAIL:] + b"\n" + ended.stderr[-_TAIL:]).decode(errors="replace").strip()
    last = said.splitlines()[-1] if said else "without a word"
    message = f"{command.argv[0]} ended with exit code {ended.exit_code}: {last[:300]}"
    return EnvironmentFailure(message, boundary="agent.run", detail=said)
