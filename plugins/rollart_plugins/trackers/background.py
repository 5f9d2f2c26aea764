"""The base of trackers whose packages may wait for a server: they work in a thread.

Takes: metrics, in the order of the run. Gives: the same to a package, one call after another.
Never: makes the run wait, except for ``timeout_s`` at its end. The first error ends the thread; the
run gets it at its next metrics, and disables the tracker.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from rollart_core.contracts.tracker import Tracker
from rollart_core.errors import first_line

Row = tuple[int, dict[str, float]]
"""A train_step and its finite metrics."""


class BackgroundTracker(Tracker):
    """A tracker that works in a thread.

    Args:
        package: The name of the package.
        missing: How to install it.
        timeout_s: Maximum time for the remaining metrics at the end, in seconds.
    """

    def __init__(self, package: str, missing: str, timeout_s: float) -> None:
        self._package, self._missing, self._timeout_s = package, missing, timeout_s
        self._rows: SimpleQueue[Row | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start the thread.

        Raises:
            ImportError: If the package is not installed.
        """
        if find_spec(self._package) is None:
            raise ImportError(self._missing)
        name = f"{self._package} tracker"
        self._thread = Thread(target=self._work, args=(run_dir, config), name=name, daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Queue all finite metrics.

        Raises:
            ConnectionError: If an earlier call to the package failed.
        """
        if self._thread is None:
            raise RuntimeError("log() before start(), or after close()")
        self._raise()
        row = {**metrics, "policy_version": policy_version}
        finite = {name: float(value) for name, value in row.items() if math.isfinite(value)}
        self._rows.put((train_step, finite))

    def close(self) -> None:
        """Wait for the remaining metrics; can be called twice.

        Raises:
            TimeoutError: If they are not written within ``timeout_s``.
            ConnectionError: If a call to the package failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._rows.put(None)
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise TimeoutError(f"the last metrics were not written within {self._timeout_s:g} s")
        self._raise()

    @abstractmethod
    def open(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Import the package, and create or continue a run."""

    @abstractmethod
    def write(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Write one row."""

    @abstractmethod
    def finish(self) -> None:
        """End the run."""

    def _raise(self) -> None:
        if self._error is not None:
            said = first_line(str(self._error) or type(self._error).__name__)
            raise ConnectionError(f"{self._package}: {said}") from self._error

    def _work(self, run_dir: Path, config: Mapping[str, object]) -> None:
        try:
            self.open(run_dir, config)
            while (row := self._rows.get()) is not None:
                self.write(*row)
            self.finish()
        except Exception as e:  # the packages document none
            self._error = e


def run_id(file: Path) -> str | None:
    """Return the id in a file of the run directory; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8").strip()
    return None
