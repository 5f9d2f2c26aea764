"""Environment adapters: wrap environments of other libraries as RollArt environments.

``ADAPTER::FOREIGN_ID`` (``gem::game:GuessTheNumber-v0``) is valid wherever an environment id is. It
has the adapter's id or alias, two colons, and the environment's id in the other library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollart_core.contracts.agent import AgentTask
from rollart_core.contracts.env import EnvSpec, TextEnv
from rollart_core.contracts.spec import PluginSpec

SEPARATOR = "::"
"""The separator between the adapter and the foreign id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAdapterSpec(PluginSpec):
    """The spec of an adapter. ``config`` validates the options of each environment."""

    package: str = ""
    """The pip requirement that provides the foreign environments. Empty if nothing is needed."""
    examples: tuple[str, ...] = ()
    """Tested foreign ids. Checks and benchmarks use them."""
    kind: Literal["step", "agent"] = "step"
    """The kind of its environments."""


class EnvAdapter(ABC):
    """Base class of adapters. Each process that needs one creates it without arguments.

    The config model of the adapter's spec has validated the options.
    """

    @abstractmethod
    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv | AgentTask:
        """Create the foreign environment ``env_id`` and wrap it."""

    @abstractmethod
    def spec(self, env_id: str, options: Mapping[str, object]) -> EnvSpec:
        """Return the spec of ``env_id``: reward range, splits, determinism, turns, licence.

        The core sets the id and the config model.

        Raises:
            PluginError: If the foreign package is not installed. The message names the pip
                requirement.
            UnknownIdError: If that package has no such environment.
        """


def split_id(env_id: str) -> tuple[str, str] | None:
    """Return the adapter and foreign id of ``ADAPTER::FOREIGN_ID``, or None for any other id."""
    adapter, separator, foreign = env_id.partition(SEPARATOR)
    return (adapter, foreign) if separator else None
