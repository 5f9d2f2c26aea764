"""Agent tasks: environments whose program has its own loop and calls an OpenAI-compatible endpoint.

An environment of ``EnvSpec(kind="agent")`` is a class. One object runs one episode after another:

    prepare(seed=, options=) -> AgentStart   # options: {"task": 3, "split": "train"}
    run(endpoint)                            # runs the program until it ends or is cancelled
    finish(recorded) -> AgentResult          # scores the result after the program has ended
    close()                                  # idempotent; stops everything that still runs

The requests that the program sends to ``endpoint.base_url`` with ``endpoint.api_key`` form the
trajectory. The gateway at that URL records each request as a turn, with its exact tokens. The key
is invalid after ``run`` has returned. An episode ends in one of these ways:

- ``run`` returns: ``finish`` scores it, and the trajectory is ``finished``.
- The budget of turns or tokens is spent: the endpoint refuses the request with an HTTP error.
  ``finish`` scores the result, even if ``run`` raises. The trajectory is ``truncated``.
- ``run`` raises for another reason: the trajectory fails (``environment``, or the kind of the
  error).
- ``run`` returns without a request: the trajectory fails (``environment``).
- The episode's deadline passes: ``run`` is cancelled and the trajectory fails (``timeout``). To be
  scored instead, a task stops its program earlier and sets ``truncated`` in its result.

``prepare`` has ``reset_s`` seconds, ``finish`` has ``step_s``, and all three together have
``episode_s``. Each may be cancelled at any ``await``. Then RollArt calls ``close`` and does not use
the object again.

Optional, as for step environments: ``num_tasks(split)``, ``corpus()``, ``secrets()``. Also
optional: ``solve()``, a coroutine that solves the task as an expert would, in place of ``run`` and
without requests. ``finish`` then returns the best reward. Checks use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollart_core.types import Message


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint at which a program reaches the policy during one episode."""

    base_url: str
    """The ``base_url`` for the ``openai`` package, such as ``http://127.0.0.1:41235/v1``."""
    api_key: str = field(repr=False)
    """Valid for this episode only."""
    model: str = "policy"
    """The value to send as ``model``."""

    def environ(self) -> Mapping[str, str]:
        """Return the environment variables that pass the endpoint to programs."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }


@dataclass(frozen=True, slots=True)
class AgentStart:
    """The start of an episode, for people and checks. The task itself passes it to the program."""

    prompt: str
    """The instruction for the agent."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for people and checks, as in the ``info`` of ``reset``."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests that the endpoint recorded, for a task that scores the conversation."""

    messages: tuple[Message, ...] = ()
    """The conversation of the last request, including its answer."""
    num_turns: int = 0
    """Number of answered requests."""
    truncated: bool = False
    """True if a budget was spent before the program ended."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result of an episode."""

    reward: float
    """A finite number within the spec's ``reward_range``."""
    success: bool | None = None
    """Whether the task was solved. None if unknown."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward, by name."""
    truncated: bool = False
    """True if the task's own rules stopped the program early."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Data for the run's reward, such as the right answer, as plain JSON. It becomes the
    ``context`` of :class:`rollart_core.contracts.reward.RewardRequest`."""


@runtime_checkable
class AgentTask(Protocol):
    """The interface of an agent environment (structural: any class with these methods)."""

    async def prepare(self, *, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Begin an episode: select the task and prepare what the program needs."""

    async def run(self, endpoint: Endpoint) -> None:
        """Run the program until it ends. If cancelled, stop the program before returning."""

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Score the program's result.

        Raises:
            Exception: If the result cannot be scored. Never return 0 instead.
        """

    def close(self) -> None:
        """Stop and release everything. May be called twice."""


class HasSolution(Protocol):
    """An agent task that has an expert solution."""

    async def solve(self) -> None:
        """Solve the task as an expert would, between ``prepare`` and ``finish``."""
