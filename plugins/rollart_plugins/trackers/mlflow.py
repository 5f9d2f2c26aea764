"""MLflow: metrics in a database beside the runs, or on a server.

Takes: metrics. Gives: an MLflow run with the config as parameters, which is continued when the
RollArt run is resumed. Never: imports mlflow before a run starts, or makes the run wait for a
server.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Seconds
from rollart_plugins.trackers.background import BackgroundTracker, run_id

NO_MLFLOW = "the mlflow tracker needs mlflow: pip install 'rollart[mlflow]'"
_MOST_PARAMS, _MOST_METRICS, _MOST_CHARS = 100, 1000, 500
"""The limits of MLflow: parameters and metrics of a call, and characters of a parameter."""
_REFUSED: Final = re.compile(r"[^\w\-./: ]")
"""Characters that MLflow allows in no name."""

Text = Annotated[str, Field(min_length=1)]


class MlflowConfig(BaseModel):
    """Options of ``rollart/Mlflow-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: Text | None = None
    """Tracking URI of MLflow. If not set, ``MLFLOW_TRACKING_URI``, or else the database
    ``mlflow.db`` in the folder of the runs."""
    experiment: Text = "rollart"
    """Experiment of the run. It is created if it does not exist."""
    name: Text | None = None
    """Name of the run in MLflow. If not set, the name of the run directory."""
    timeout_s: Seconds = 30.0
    """Maximum time to wait for the remaining metrics at the end of the run."""

    def missing(self) -> dict[str, str]:
        """Return the missing package, by option."""
        return {"id": NO_MLFLOW} if find_spec("mlflow") is None else {}


class MlflowTracker(BackgroundTracker):
    """Log scalars by train_step, and the config as parameters.

    Args:
        config: Options of the tracker.
        options: The same options as keyword arguments, as the registry passes them.
    """

    def __init__(self, config: MlflowConfig | None = None, **options: object) -> None:
        self._config = config or MlflowConfig.model_validate(options)
        super().__init__("mlflow", NO_MLFLOW, self._config.timeout_s)
        self._client: Any = None
        self._run_id = ""

    def open(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Create an MLflow run, or continue the one of the run directory."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        database = f"sqlite:///{(run_dir.parent / 'mlflow.db').resolve()}"
        server = self._config.server or os.environ.get("MLFLOW_TRACKING_URI") or database
        self._client = mlflow.MlflowClient(tracking_uri=server)
        file = run_dir / "mlflow" / "run-id"
        known = run_id(file)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._run_id = known
            return
        name = self._config.name or run_dir.name
        self._run_id = self._client.create_run(self._experiment(), run_name=name).info.run_id
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{self._run_id}\n", encoding="utf-8")
        self._log_params(config)

    def write(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics of a train_step."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(_name(k), v, now_ms, train_step) for k, v in metrics.items()]
        for first in range(0, len(rows), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=rows[first : first + _MOST_METRICS])

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)

    def _experiment(self) -> str:
        """Return the id of the experiment, which is created if necessary."""
        name = self._config.experiment
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _log_params(self, config: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        rows = [Param(_name(k), v[:_MOST_CHARS]) for k, v in _flat(config)]
        for first in range(0, len(rows), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=rows[first : first + _MOST_PARAMS])


def _name(name: str) -> str:
    return _REFUSED.sub("_", name)


def _flat(config: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of a config with its dotted key; lists are JSON."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{before}{key}", text
