"""Trackers: where metrics go besides the journal.

Takes: nothing. Gives: the base of trackers and their spec. Never: is what a run's record hangs on;
that is the journal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec(PluginSpec):
    """What a tracker says of itself."""


class Tracker(ABC):
    """Base of trackers. A tracker that raises is switched off with a warning; the run goes on."""

    @abstractmethod
    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Begin; ``config`` is the resolved run config."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Record metrics of one train_step (names with slashes, such as ``train/loss``)."""

    @abstractmethod
    def close(self) -> None:
        """Flush and end; may be called twice."""
