"""Who watches a run: the progress display of the command line, a test, or nobody.

Takes: what happens. Gives: nothing. Never: changes the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class RunObserver(Protocol):
    """Watches a run."""

    def phase(self, name: str, detail: str = "") -> None:
        """A phase begins: ``set up``, ``warm start``, ``evaluate before``, ``train``, ..."""

    def progress(self, fraction: float | None, line: Mapping[str, float | str]) -> None:
        """The phase got on; ``fraction`` is None when nobody knows how far."""

    def message(self, text: str) -> None:
        """Something a person should read once."""


class NobodyWatches:
    """An observer that ignores everything."""

    def phase(self, name: str, detail: str = "") -> None:
        """Ignore it."""

    def progress(self, fraction: float | None, line: Mapping[str, float | str]) -> None:
        """Ignore it."""

    def message(self, text: str) -> None:
        """Ignore it."""
