"""JSON lines: metrics in a file of the run directory, for `jq`, pandas and scripts.

Takes: metrics. Gives: ``metrics.jsonl``, one object per train_step, written at once. Never: changes
lines that are written; after a resume, further lines follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rollart_core.contracts.tracker import Tracker

FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Write one JSON object per train_step; a metric that is not finite is null."""

    _file: TextIO | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Open the file."""
        self._file = (run_dir / FILE).open("a", encoding="utf-8", buffering=1)

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Write one line."""
        if self._file is None:
            raise RuntimeError("log() before start(), or after close()")
        finite = {k: float(v) if math.isfinite(v) else None for k, v in metrics.items()}
        row = {"train_step": train_step, "policy_version": policy_version, **finite}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Close the file; can be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
