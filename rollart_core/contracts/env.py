"""Environments: ``gymnasium.Env[Observation, str]``, plus a few optional methods.

An environment never uses the tokenizer. It receives text and returns text or chat messages. The
engine records the tokens. Any gymnasium environment with text actions works:

    reset(*, seed=None, options=None) -> (observation, info)  # options: {"task": 3, "split": "x"}
    step(action: str) -> (observation, reward, terminated, truncated, info)
    close()                                                     # idempotent

Optional methods:

- ``oracle() -> str | None``: the expert's next action.
- ``num_tasks(split) -> int | None``: the number of tasks. None or no method means unlimited.
- ``areset`` and ``astep``: coroutines, for an environment that waits on I/O.
- ``task_clusters(split) -> Sequence[str] | None``: a name for each task. Tasks with the same name
  are similar, such as goals of one product. A split that a run makes never separates them.
- ``corpus() -> Iterable[str]``: text to train a tokenizer from scratch.
- ``secrets() -> Sequence[str]``: texts of the current task that the agent must never read.
- ``typed_action(text) -> str``: the action for a text that a person types in ``rollart play``.

``info`` may have ``available_actions``, ``reward_components`` (name -> float) and ``success``. The
``info`` of ``reset`` may have ``tools``, the tools that the policy may call (see
:mod:`rollart_core.rollout.tools`). Any ``info`` may have ``reward_context``: plain JSON for the
run's reward, such as the right answer under ``reference``. The policy never sees any part of an
info.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

from rollart_core.contracts.spec import PluginSpec
from rollart_core.types import Observation

ALL_TASKS: Final = "all"
"""Name of a split that has the tasks of all other splits."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The expected load of an environment on the hardware, per turn unless stated otherwise."""

    prefill_tokens: float = 200.0
    """New prompt tokens per turn."""
    decode_tokens: float = 50.0
    """Generated tokens per turn."""
    turns: float = 5.0
    """Turns per episode."""
    env_s: float = 0.001
    """Seconds of ``env.step`` per turn."""
    reward_s: float = 0.0
    """Seconds of the reward function per episode."""
    rows: float = 1.0
    """Token rows per episode. Specs do not set it: the chat template decides. Above 1, the tokens
    of earlier turns are trained again in each row."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Default deadlines of each phase, in seconds. A run may set its own."""

    reset_s: float = 30.0
    """Seconds for ``reset``."""
    step_s: float = 30.0
    """Seconds for ``step``."""
    close_s: float = 10.0
    """Seconds for ``close``."""


@dataclass(frozen=True, slots=True)
class RunDefaults:
    """Settings that a run with an environment needs.

    Each one replaces a smaller default of the run config, but never a value that the config sets.
    """

    max_new_tokens: int = 0
    """For ``rollout.max_new_tokens``."""
    max_context_tokens: int = 0
    """For ``rollout.max_context_tokens``."""
    episode_s: float = 0.0
    """For ``deadlines.episode_s``."""
    ticket_s: float = 0.0
    """For ``deadlines.ticket_s``."""
    sandbox_ttl_s: float = 0.0
    """For ``deadlines.sandbox_ttl_s``."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one instance."""

    cpu: float = 0.1
    """CPU cores."""
    memory_bytes: int = 64 * 2**20
    """Memory, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec(PluginSpec):
    """The spec of an environment."""

    kind: Literal["step", "agent"] = "step"
    """``step``: RollArt calls ``reset`` and ``step``. ``agent``: a program has its own loop and
    calls an endpoint (:mod:`rollart_core.contracts.agent`)."""
    splits: tuple[str, ...] = ("train", "test")
    """Names of the task splits. A split `all` has the tasks of all others."""
    disjoint_splits: bool = True
    """Whether no task is in two splits, except `all`. False if splits may share tasks."""
    reports_success: bool = True
    """Whether its infos may have ``success``. If False, RollArt rejects configs that need
    ``success`` before the run starts."""
    success_by_reward: bool = False
    """Whether the reward of a run, if it has one, decides success and score instead of the
    environment's own comparison (``scoring.success_from``)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The smallest and largest return of an episode."""
    deterministic: bool = True
    """Whether the same seed, options and actions give the same episode in any process."""
    max_turns: int = 10
    """The default for ``rollout.max_turns``."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Default deadlines of each phase, in seconds."""
    run_defaults: RunDefaults = field(default_factory=RunDefaults)
    """Larger defaults for the run config."""
    resources: Resources = field(default_factory=Resources)
    """CPU cores and memory of one instance."""
    sandbox: str | None = None
    """Id or alias of the sandbox that it must run in. None if it needs no isolation."""
    network: bool = False
    """Whether it needs the network."""
    slow_start: bool = False
    """Whether it takes seconds to build, or needs data that is not here. The dry run, which counts
    tasks and shows the first one, then does not build it."""
    tools: bool = False
    """Whether it declares tools in ``info["tools"]`` of ``reset``. Its actions are then texts of
    :class:`rollart_core.rollout.tools.action.ToolAction`. For an agent: whether its program sends
    tools. The option ``tools: true`` of an environment sets it too. An unregistered class is a
    ``ToolEnv`` or has the class attribute ``tools = True``."""
    workload: Workload = field(default_factory=Workload)
    """Expected load per turn, until the run has measured values."""
    licence: str = ""
    """Licence of the environment and its data, as an SPDX expression."""


@runtime_checkable
class TextEnv(Protocol):
    """The minimal interface of an environment (structural: gymnasium.Env fits)."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode and return the first observation."""

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Apply an action and return observation, reward, terminated, truncated, info."""

    def close(self) -> None:
        """Release everything. May be called twice."""


class HasOracle(Protocol):
    """An environment that has an expert."""

    def oracle(self) -> str | None:
        """Return the expert's next action in the current state, or None if there is none."""


class HasCorpus(Protocol):
    """An environment that provides text to train a tokenizer on."""

    def corpus(self) -> Iterable[str]:
        """Yield texts such as the policy reads and writes."""


class HasSecrets(Protocol):
    """An environment with secrets that its agent must not read, such as answers or hidden tests."""

    def secrets(self) -> Sequence[str]:
        """Return texts of the current task that the agent must never be able to read.

        Checks search for them in every observation and info before the episode ends.
        """
