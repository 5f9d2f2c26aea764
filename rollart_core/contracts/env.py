"""Environments: ``gymnasium.Env[Observation, str]``, plus a few optional methods.

An environment never sees the tokenizer. It answers text (or chat messages) to text; the engine
records the tokens. Any gymnasium environment with text actions is one already:

    reset(*, seed=None, options=None) -> (observation, info)  # options: {"task": 3, "split": "x"}
    step(action: str) -> (observation, reward, terminated, truncated, info)
    close()                                                     # idempotent

Optional: ``oracle() -> str | None`` (the expert's next action), ``num_tasks(split) -> int | None``
(None or missing: unlimited), ``areset`` / ``astep`` (coroutines, when the env waits on I/O),
``task_clusters(split) -> Sequence[str] | None`` (a name for each task; tasks with the same name are
alike, such as goals of one product, and are never on both sides of a split that a run makes),
``corpus() -> Iterable[str]`` (text for training a tokenizer from nothing),
``secrets() -> Sequence[str]`` (texts of the present task that the agent must never read).
``info`` may carry ``available_actions``, ``reward_components`` (name -> float) and ``success``;
that of ``reset`` may carry ``tools``, what the policy may call: see
:mod:`rollart_core.rollout.tools`. And any ``info`` may carry ``reward_context``: plain JSON for the
run's reward, such as the right answer under ``reference``; the policy never sees it, nor any other
part of an info.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from rollart_core.contracts.spec import PluginSpec
from rollart_core.types import Observation


@dataclass(frozen=True, slots=True)
class Workload:
    """What an environment asks of the hardware, per turn unless named otherwise."""

    prefill_tokens: float = 200.0
    decode_tokens: float = 50.0
    turns: float = 5.0
    env_s: float = 0.001
    reward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds an environment is given for each phase, unless the run sets its own."""

    reset_s: float = 30.0
    step_s: float = 30.0
    close_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Resources:
    """What one instance takes."""

    cpu: float = 0.1
    memory_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec(PluginSpec):
    """What an environment says of itself."""

    kind: Literal["step", "agent"] = "step"
    splits: tuple[str, ...] = ("train", "test")
    disjoint_splits: bool = True
    """No task is in two splits. False: splits may share tasks, as it has few or does not know."""
    reports_success: bool = True
    """Its infos may have ``success``. False: none has, and what needs it is refused early."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest return of an episode."""
    deterministic: bool = True
    """The same seed, options and actions give the same episode, in any process."""
    max_turns: int = 10
    """A sensible default for ``rollout.max_turns``."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    resources: Resources = field(default_factory=Resources)
    sandbox: str | None = None
    """Id or alias of the sandbox it must run in; None when it needs no wall."""
    network: bool = False
    tools: bool = False
    """It declares tools: ``info["tools"]`` of ``reset``, and its actions are those of
    :class:`rollart_core.rollout.tools.action.ToolAction`."""
    workload: Workload = field(default_factory=Workload)
    licence: str = ""


@runtime_checkable
class TextEnv(Protocol):
    """The least that an environment offers (structural: gymnasium.Env fits)."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode and return the first observation."""

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Act, and return observation, reward, terminated, truncated, info."""

    def close(self) -> None:
        """Free everything; may be called twice."""


class HasOracle(Protocol):
    """An environment that knows the expert's next action."""

    def oracle(self) -> str | None:
        """Return the expert's next action in the present state, or None when it has none."""


class HasCorpus(Protocol):
    """An environment that can give text to train a tokenizer on."""

    def corpus(self) -> Iterable[str]:
        """Yield texts as the policy will see and write them."""


class HasSecrets(Protocol):
    """An environment that knows what its agent must not: answers, hidden tests."""

    def secrets(self) -> Sequence[str]:
        """Return texts of the present task that the agent must never be able to read.

        Checks look for them in every observation and info before the end of the episode.
        """
