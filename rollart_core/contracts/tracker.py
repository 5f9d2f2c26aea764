"""Trackers: send metrics to further destinations, in addition to the journal.

Takes: nothing. Gives: the base of trackers and their spec. Never: replaces the record of a run,
which is the journal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec(PluginSpec):
    """The spec of a tracker."""


class Tracker(ABC):
    """Base class of trackers. If a tracker raises, it is disabled with a warning."""

    @abstractmethod
    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start the tracker. ``config`` is the resolved run config."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Record metrics of one train_step (names with slashes, such as ``train/loss``)."""

    @abstractmethod
    def close(self) -> None:
        """Flush and stop. May be called twice."""
