"""TensorBoard: event files in the run directory.

Takes: metrics. Gives: ``tensorboard/`` under the run directory. Never: imports tensorboardX before
a run starts, or writes a non-finite number, which breaks the plots of TensorBoard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollart_core.contracts.tracker import Tracker

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_HOW_TO_INSTALL = "the tensorboard tracker needs tensorboardX: pip install 'rollart[train]'"


class TensorBoardTracker(Tracker):
    """Write scalars by train_step, and the config as text."""

    _writer: SummaryWriter | None = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Open the event file.

        Raises:
            ImportError: If tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as e:
            raise ImportError(_HOW_TO_INSTALL) from e
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        """Write one point for each finite metric."""
        if self._writer is None:
            raise RuntimeError("log() before start(), or after close()")
        for name, value in {**metrics, "policy_version": policy_version}.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, train_step)

    def close(self) -> None:
        """Flush and close the file; can be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
