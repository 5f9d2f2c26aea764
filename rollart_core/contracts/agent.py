"""Agent tasks: environments whose program owns its loop and asks an OpenAI-compatible endpoint.

An environment of ``EnvSpec(kind="agent")`` is a class; an object of it serves one episode after
another:

    prepare(seed=, options=) -> AgentStart   # options: {"task": 3, "split": "train"}
    run(endpoint)                            # the program; ends by itself, or is cancelled
    finish(recorded) -> AgentResult          # judges what is there, after the program's end
    close()                                  # idempotent; ends whatever still runs

What the program asks of ``endpoint.base_url`` with ``endpoint.api_key`` is the trajectory: the
gateway there records each request as a turn, to the token. Once ``run`` has returned, the key is
dead. What ends an episode, and what comes of it:

- ``run`` returns: ``finish`` judges, and the trajectory is ``finished``;
- the endpoint has refused a request because the budget of turns or tokens is spent: the program
  gets an HTTP error, and however it takes that (an exception of ``run`` included), ``finish``
  judges what is there; the trajectory is ``truncated``;
- ``run`` raises otherwise: the trajectory has failed (``environment``, or what the error says);
- ``run`` returns and never asked anything: failed (``environment``);
- the episode's deadline passes: ``run`` is cancelled and failed (``timeout``). A task that would
  rather be judged as it stands ends its program before that, and says ``truncated`` in its result.

``prepare`` has ``reset_s`` seconds, ``finish`` ``step_s``, all three together ``episode_s``. Any of
them may be cancelled at any ``await``; then ``close`` is next, and the object is not used again.

Optional, as for step environments: ``num_tasks(split)``, ``corpus()``, ``secrets()``. And
``solve()``, a coroutine that does in the place of ``run`` what an expert would, without asking
anything: ``finish`` then gives the best reward. Checks use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollart_core.types import Message


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a program finds the policy, for one episode."""

    base_url: str
    """Such as ``http://127.0.0.1:41235/v1``: what the ``openai`` package takes as ``base_url``."""
    api_key: str = field(repr=False)
    """Of this episode alone; dead after it."""
    model: str = "policy"
    """What to send as ``model``."""

    def environ(self) -> Mapping[str, str]:
        """Return the variables by which programs are told."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }


@dataclass(frozen=True, slots=True)
class AgentStart:
    """What an episode begins with, for people and checks; the program is told by its task."""

    prompt: str
    """What the agent is asked."""
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the endpoint saw, for a task that judges by what was said."""

    messages: tuple[Message, ...] = ()
    """The conversation of the last request, its answer included."""
    num_turns: int = 0
    """Answered requests."""
    truncated: bool = False
    """A budget was spent before the program was at its end."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What came of an episode."""

    reward: float
    """Finite, and within the spec's ``reward_range``."""
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    """The program was cut short by the task's own rules."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """What the run's reward is to know, such as the right answer, as plain JSON: the ``context``
    of :class:`rollart_core.contracts.reward.RewardRequest`."""


@runtime_checkable
class AgentTask(Protocol):
    """What an agent environment offers (structural: any such class fits)."""

    async def prepare(self, *, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Begin an episode: choose the task, open what the program needs."""

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program to its end; when cancelled, end it before returning."""

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Judge what the program has left.

        Raises:
            Exception: When it cannot be judged; never answer 0 for that.
        """

    def close(self) -> None:
        """End and free everything; may be called twice."""


class HasSolution(Protocol):
    """An agent task that knows how it is done."""

    async def solve(self) -> None:
        """Do what an expert would, between ``prepare`` and ``finish``."""
