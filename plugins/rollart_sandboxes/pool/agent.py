"""The base of agent tasks whose program is a command in a box.

    begin -> [the box's own port leads to the endpoint: the command runs] -> judge

Takes: coroutines ``begin``, ``command`` and ``judge`` of a subclass. Gives: the contract of
:class:`rollart_core.contracts.agent.AgentTask`. Never: gives the box a network, lets the program or
what it has started run on past its end, or keeps a box after a failed call.

The program is told by ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``. Its address is
one of the box's own loopback, from where the sandbox leads to the gateway and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import EnvironmentFailure
from rollart_core.rollout import loop
from rollart_sandboxes.pool.lease import SandboxLease
from rollart_sandboxes.pool.source import SandboxSource

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
