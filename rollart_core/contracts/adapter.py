"""Environment adapters: how a foreign kind of environment becomes one of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from rollart_core.contracts.env import TextEnv
from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAdapterSpec(PluginSpec):
    """What an adapter says of itself."""


class EnvAdapter(ABC):
    """Base of adapters."""

    @abstractmethod
    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """Make the foreign environment ``env_id`` and wrap it."""
