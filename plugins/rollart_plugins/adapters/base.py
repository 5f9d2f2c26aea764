"""Code that all adapters share: common options, tasks as seed ranges, and a TextEnv over a session.

Takes: a session module (:mod:`rollart_plugins.adapters.sessions`) and checked options.
Gives: :class:`ForeignAdapter`, the base class of the adapters. Never: imports a foreign package.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

import gymnasium
from pydantic import BaseModel, ConfigDict

from rollart_core.config.base import Number, Positive, PositiveInt
from rollart_core.contracts.adapter import EnvAdapter
from rollart_core.contracts.env import EnvSpec, TextEnv, Timeouts
from rollart_core.errors import PluginError
from rollart_core.spaces import Messages, Text
from rollart_core.types import Observation
from rollart_plugins.adapters.fields import Splits
from rollart_plugins.adapters.process import Opening, RemoteEnvProcess, describe, user_error
from rollart_sandboxes.isolation import server

DEFAULT_SPLITS: Mapping[str, tuple[int, int]] = {
    "train": (0, 100_000),
    "warm": (100_000, 110_000),
    "test": (110_000, 120_000),
}
"""Default seeds of each split: the first seed, and the end (exclusive)."""
UNKNOWN_RANGE = (float("-inf"), float("inf"))
_SESSIONS = Path(__file__).parent / "sessions"
_NOT_FOREIGN = {"prompt", "python", "reward_scale", "reward_range", "num_tasks"}
"""Common options that are not passed to a session."""


class AdapterOptions(BaseModel):
    """Options of every adapter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str | None = None
    """Text before the first observation. If it contains `{observation}`, the observation is
    inserted there. If not set, the prompt of the adapter. Empty: no prompt."""
    python: str | None = None
    """Another Python (3.8 or newer) in which the foreign package is installed. The environments run
    in a separate process, one for each worker. If not set, this Python."""
    max_turns: PositiveInt | None = None
    """Number of turns after which an episode is truncated. If not set, the limit of the foreign
    environment."""
    reward_scale: Positive = 1.0
    """Factor of every reward."""
    reward_range: tuple[Number, Number] | None = None
    """Smallest and largest return (scaled), if the adapter cannot determine them."""
    num_tasks: PositiveInt | None = None
    """Maximum number of tasks in each split."""
    splits: Splits | None = None
    """First seed and end of each split. Task `i` has the seed `first + i`. If not set, the splits
    of the foreign package if it has any, otherwise train 0 to 100000, warm to 110000, test to
    120000."""


class RemoteEnv(Protocol):
    """A session, in this process or in another one."""

    def facts(self) -> Any:
        """Return the description of the session."""

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[Any, Any]:
        """Begin an episode."""

    def step(self, action: str) -> tuple[Any, float, bool, bool, Any]:
        """Execute one action."""

    def oracle(self) -> str | None:
        """Return the next action of the expert."""

    def secrets(self) -> list[str]:
        """Return the texts that the agent must not read."""

    def close(self) -> None:
        """Close the session."""


class ForeignAdapter(EnvAdapter):
    """Base class of the adapters. A subclass names a session module and the foreign package."""

    session: ClassVar[str]
    """Module of ``rollart_plugins.adapters.sessions``."""
    options: ClassVar[type[AdapterOptions]]
    """Options of the adapter, including the common ones."""
    module: ClassVar[str] = ""
    """Module that must be importable. Empty: none."""
    package: ClassVar[str] = ""
    """Name of the package to install with pip."""

    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """Make a foreign environment.

        Raises:
            UserError: If the package is missing, or the id or the options are invalid.
        """
        chosen = self.options(**options)
        opening = self._opening(env_id, chosen)
        remote = _open(opening, chosen)
        offers = frozenset(remote.facts()["offers"])
        return _CLASSES[offers](remote, opening, chosen)

    def spec(self, env_id: str, options: Mapping[str, object]) -> EnvSpec:
        """Return the spec of a foreign environment.

        Raises:
            UserError: If the package is missing, or the id or the options are invalid.
        """
        chosen = self.options(**options)
        said = self._described(self._opening(env_id, chosen), chosen)
        low, high = said.get("reward_range") or UNKNOWN_RANGE
        scaled = (low * chosen.reward_scale, high * chosen.reward_scale)
        return EnvSpec(
            id=env_id,
            entry_point=f"{type(self).__module__}:{type(self).__name__}",
            summary=str(said.get("summary", "")),
            splits=tuple(chosen.splits or said.get("splits") or DEFAULT_SPLITS),
            disjoint_splits=False,  # other seeds, but possibly the same tasks
            reward_range=chosen.reward_range or scaled,
            deterministic=bool(said.get("deterministic", True)),
            max_turns=chosen.max_turns or int(said.get("max_turns") or 10),
            timeouts=Timeouts(**said.get("timeouts", {})),
            network=bool(said.get("network", False)),
            licence=str(said.get("licence", "")),
        )

    def _opening(self, env_id: str, chosen: AdapterOptions) -> Opening:
        if chosen.python is None:
            self._refuse_missing()
        path = str(_SESSIONS / f"{self.session}.py")
        python = sys.executable if chosen.python is None else _interpreter(chosen.python)
        foreign = chosen.model_dump(mode="json", exclude=_NOT_FOREIGN)
        return Opening(python, path, env_id, foreign)

    def _refuse_missing(self) -> None:
        if self.module and find_spec(self.module) is None:
            raise PluginError(
                f"{self.package} is not installed. Install it with pip install {self.package!r}, "
                "here or in another environment, and set the option python to the interpreter "
                "of that environment"
            )

    def _described(self, opening: Opening, chosen: AdapterOptions) -> dict[str, Any]:
        if chosen.python is not None:
            return describe(opening)
        try:
            return dict(server.describe(opening.path, opening.env_id, dict(opening.options)))
        except (LookupError, ValueError, ImportError) as e:
            raise _told(e, opening) from e


class ForeignEnv(gymnasium.Env[Observation, str]):
    """A foreign environment with the interface of a RollArt environment.

    If the process of another Python has died, the next ``reset`` starts it again.
    """

    def __init__(self, remote: RemoteEnv, opening: Opening, chosen: AdapterOptions) -> None:
        facts = remote.facts()
        self.observation_space: Any = Messages() if facts.get("messages") else Text()
        self.action_space = Text()
        self._remote, self._opening, self._chosen = remote, opening, chosen
        self._splits = _splits(chosen, facts)
        prompt = facts["prompt"] if chosen.prompt is None else chosen.prompt
        self._prompt: str = prompt or ""
        self._max_turns: int | None = chosen.max_turns or facts["max_turns"]
        self._turn, self._over, self._closed = 0, True, False

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks in a split."""
        first, end = self._range(split)
        return end - first

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the task of ``options`` (``task``, ``split``), or a task drawn with ``seed``."""
        super().reset(seed=seed)
        options = options or {}
        split = str(options.get("split") or next(iter(self._splits)))
        first, end = self._range(split)
        index = options.get("task")
        if index is None:
            index = int(self.np_random.integers(end - first))
        if not 0 <= index < end - first:
            raise ValueError(f"task {index} is not in split {split!r}: 0 to {end - first - 1}")
        self._revive()
        observation, info = self._remote.reset(first + index, {"split": split, "index": index})
        self._turn, self._over = 0, False
        return _with_prompt(self._prompt, observation), info

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        if self._over:
            raise RuntimeError("the episode is over: call reset() first")
        observation, reward, terminated, truncated, info = self._remote.step(action)
        self._turn += 1
        if self._max_turns is not None and self._turn >= self._max_turns:
            truncated = truncated or not terminated
        self._over = terminated or truncated
        return observation, reward * self._chosen.reward_scale, terminated, truncated, info

    def close(self) -> None:
        """Close the foreign environment. The last one in another Python also ends its process."""
        self._over = self._closed = True
        self._remote.close()

    def _range(self, split: str) -> tuple[int, int]:
        if split not in self._splits:
            raise ValueError(f"no split {split!r}; available splits: {', '.join(self._splits)}")
        return self._splits[split]

    def _revive(self) -> None:
        if self._closed:
            raise RuntimeError("the environment is closed")
        if not getattr(self._remote, "alive", True):
            self._remote.close()
            self._remote = _open(self._opening, self._chosen)


class _OracleEnv(ForeignEnv):
    def oracle(self) -> str | None:
        """Return the next action of the expert."""
        return None if self._over else self._remote.oracle()


class _SecretsEnv(ForeignEnv):
    def secrets(self) -> list[str]:
        """Return texts of the current task that the agent must not read."""
        return self._remote.secrets()


class _FullEnv(_OracleEnv, _SecretsEnv):
    """An environment with an oracle and secrets."""


_CLASSES: Mapping[frozenset[str], type[ForeignEnv]] = {
    frozenset(): ForeignEnv,
    frozenset({"oracle"}): _OracleEnv,
    frozenset({"secrets"}): _SecretsEnv,
    frozenset({"oracle", "secrets"}): _FullEnv,
}


def _open(opening: Opening, chosen: AdapterOptions) -> RemoteEnv:
    if chosen.python is not None:
        return RemoteEnvProcess(opening)
    try:
        return server.EnvSlot(opening.path, opening.env_id, dict(opening.options))
    except (LookupError, ValueError, ImportError) as e:
        raise _told(e, opening) from e


def _told(error: Exception, opening: Opening) -> Exception:
    names = [cls.__name__ for cls in type(error).__mro__]
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return user_error(names, message, opening)


def _splits(chosen: AdapterOptions, facts: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    found = chosen.splits or facts["splits"] or DEFAULT_SPLITS
    most = chosen.num_tasks or sys.maxsize
    return {name: (first, min(end, first + most)) for name, (first, end) in found.items()}


def _with_prompt(prompt: str, observation: Observation) -> Observation:
    if not prompt:
        return observation
    if not isinstance(observation, str):
        return [{"role": "system", "content": prompt}, *observation]
    if "{observation}" in prompt:
        return prompt.replace("{observation}", observation)
    return f"{prompt}\n\n{observation}"


def _interpreter(python: str) -> str:
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise PluginError(f"python: {python!r} is not a program; set a Python interpreter")
    return found
