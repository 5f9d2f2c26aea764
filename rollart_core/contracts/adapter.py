"""Environment adapters: how a foreign kind of environment becomes one of ours.

``ADAPTER::FOREIGN_ID`` (``gem::game:GuessTheNumber-v0``) stands wherever an environment's id may:
the adapter's id or alias, two colons, and the id that the foreign package knows.
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
"""Between an adapter and the foreign id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAdapterSpec(PluginSpec):
    """What an adapter says of itself; ``config`` checks the options of each environment."""

    package: str = ""
    """What pip installs to bring the foreign environments; empty: nothing is needed."""
    examples: tuple[str, ...] = ()
    """Foreign ids that were tried; checks and benchmarks use them."""
    kind: Literal["step", "agent"] = "step"
    """Of its environments."""


class EnvAdapter(ABC):
    """Base of adapters: made without arguments, in every process that needs it.

    Options are those that the config model of the adapter's spec has checked.
    """

    @abstractmethod
    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv | AgentTask:
        """Make the foreign environment ``env_id`` and wrap it."""

    @abstractmethod
    def spec(self, env_id: str, options: Mapping[str, object]) -> EnvSpec:
        """Say what is known of ``env_id``: reward range, splits, determinism, turns, licence.

        The core puts in the id and the options' model itself.

        Raises:
            PluginError: When the foreign package is not installed; says what pip must install.
            UnknownIdError: When that package has no such environment.
        """


def split_id(env_id: str) -> tuple[str, str] | None:
    """Return adapter and foreign id of ``ADAPTER::FOREIGN_ID``; None for any other id."""
    adapter, separator, foreign = env_id.partition(SEPARATOR)
    return (adapter, foreign) if separator else None
