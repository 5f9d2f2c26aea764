"""Trackio: metrics in local files for its dashboard, on a Hugging Face Space, or on a server.

Takes: metrics. Gives: a Trackio run, which is continued when the RollArt run is resumed.
Never: imports trackio before a run starts, or makes the run wait for a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Seconds
from rollart_plugins.trackers.background import BackgroundTracker

NO_TRACKIO = "the trackio tracker needs trackio: pip install 'rollart[trackio]'"

Text = Annotated[str, Field(min_length=1)]


class TrackioConfig(BaseModel):
    """Options of ``rollart/Trackio-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: Text = "rollart"
    """Project of the run."""
    name: Text | None = None
    """Name of the run in Trackio. If not set, the name of the run directory."""
    space: Text | None = None
    """Hugging Face Space for the metrics, such as ``user/name``. If it does not exist, it is
    created as a private Space. If not set, metrics are stored on this machine."""
    timeout_s: Seconds = 60.0
    """Maximum time to wait for the remaining metrics at the end of the run."""

    def missing(self) -> dict[str, str]:
        """Return the missing package, by option."""
        return {"id": NO_TRACKIO} if find_spec("trackio") is None else {}


class TrackioTracker(BackgroundTracker):
    """Log scalars by train_step, and the config.

    Args:
        config: Options of the tracker.
        options: The same options as keyword arguments, as the registry passes them.
    """

    def __init__(self, config: TrackioConfig | None = None, **options: object) -> None:
        self._config = config or TrackioConfig.model_validate(options)
        super().__init__("trackio", NO_TRACKIO, self._config.timeout_s)
        self._run: Any = None

    def open(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Create a Trackio run, or continue the one with this name."""
        import trackio
        from trackio import run, utils

        for module in (trackio, run, utils):
            vars(module)["print"] = _silent  # the terminal belongs to the run
        self._run = trackio.init(
            project=self._config.project,
            name=self._config.name or run_dir.name,
            space_id=self._config.space,
            private=True,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics of a train_step."""
        self._run.log(dict(metrics), step=train_step)

    def finish(self) -> None:
        """Write the remaining metrics."""
        self._run.finish()


def _silent(*_: object, **__: object) -> None:
    """Print nothing."""
