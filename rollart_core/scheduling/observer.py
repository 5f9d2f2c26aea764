"""The observer of a run: the progress display of the command line, a test, or none.

Takes: the progress of a run. Gives: nothing. Never: changes the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class RunObserver(Protocol):
    """Observes a run."""

    def phase(self, name: str, detail: str = "") -> None:
        """Handle the start of a phase: ``set up``, ``warm start``, ``evaluate before``, ..."""

    def progress(self, fraction: float | None, line: Mapping[str, float | str]) -> None:
        """Handle progress in the phase; ``fraction`` is None if the total is unknown."""

    def message(self, text: str) -> None:
        """Handle a message for the user."""


class NobodyWatches:
    """An observer that ignores everything."""

    def phase(self, name: str, detail: str = "") -> None:
        """Do nothing."""

    def progress(self, fraction: float | None, line: Mapping[str, float | str]) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""
