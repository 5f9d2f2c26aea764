"""The MLflow and Trackio trackers with the real packages, on this machine; and where they fail."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollart_plugins.trackers import background
from rollart_plugins.trackers.background import BackgroundTracker
from rollart_plugins.trackers.mlflow import MlflowTracker
from rollart_plugins.trackers.trackio import TrackioTracker

CONFIG: Mapping[str, object] = {
    "algorithm": {"id": "a-known-algorithm"},
    "env": [{"id": "toy/A-v1", "long": "x" * 9000}],
    "odd#key": None,
}
METRICS = {"train/loss": 0.5, "train/odd": math.nan, "rollout/success, a#2": 1.0}
PACKAGES_WARN = pytest.mark.filterwarnings("default")
"""What the packages do themselves may be deprecated in what they use."""


@pytest.mark.parametrize(
    ("tracker", "name"), [(MlflowTracker, "mlflow"), (TrackioTracker, "trackio")]
)
def test_a_missing_package_is_named_with_the_extra(
    tracker: type[BackgroundTracker], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "find_spec", lambda package: None)
    with pytest.raises(ImportError, match=rf"pip install 'rollart\[{name}\]'"):
        tracker().start(tmp_path, {})
    with pytest.raises(RuntimeError, match="start"):
        tracker().log({}, train_step=0, policy_version=0)


def logged(tracker: BackgroundTracker, run_dir: Path, *steps: int) -> None:
    """Log the metrics at some train_steps, as one start of a run does."""
    tracker.start(run_dir, CONFIG)
    for step in steps:
        tracker.log(METRICS, train_step=step, policy_version=step - 1)
    tracker.close()
    tracker.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "hello-1"
    folder.mkdir()
    return folder


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return pytest.importorskip("mlflow", reason="mlflow is in rollart[mlflow]")


@PACKAGES_WARN
def test_mlflow_has_metrics_and_config_and_a_resume_is_the_same_run(
    mlflow: Any, run_dir: Path
) -> None:
    logged(MlflowTracker(experiment="gym", timeout_s=200), run_dir, 1)
    logged(MlflowTracker(experiment="gym", timeout_s=200), run_dir, 2)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("gym").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("hello-1", "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in losses] == [(1, 0.5), (2, 0.5)]
    assert set(run.data.metrics) == {"train/loss", "rollout/success_ a_2", "policy_version"}
    assert run.data.params["algorithm.id"] == "a-known-algorithm"
    assert len(run.data.params["env"]) == 500


@PACKAGES_WARN
def test_an_mlflow_that_cannot_be_reached_is_one_line_at_the_next_metrics(
    mlflow: Any, run_dir: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{closed.getsockname()[1]}"
    tracker = MlflowTracker(server=server, timeout_s=200)
    tracker.start(run_dir, CONFIG)
    for thread in threading.enumerate():
        if thread.name == "mlflow tracker":
            thread.join(200)
    with pytest.raises(ConnectionError, match=r"mlflow: .*127\.0\.0\.1") as refused:
        tracker.log(METRICS, train_step=1, policy_version=0)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package, with a folder for its files: it reads the variable when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield pytest.importorskip("trackio", reason="trackio is in rollart[trackio]")


@PACKAGES_WARN
def test_trackio_has_metrics_and_config_and_a_resume_is_the_same_run(
    trackio: Any, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(TrackioTracker(project="gym", timeout_s=200), run_dir, 1)
    logged(TrackioTracker(project="gym", timeout_s=200), run_dir, 2)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("gym") == ["hello-1"]
    rows = SQLiteStorage.get_logs("gym", "hello-1")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 0.5), (2, 0.5)]
    assert "train/odd" not in rows[0]
    config = SQLiteStorage.get_run_config("gym", "hello-1")
    assert config["algorithm"] == {"id": "a-known-algorithm"}
    assert capsys.readouterr().out == ""


class Stuck(BackgroundTracker):
    """A tracker whose server never answers."""

    def __init__(self) -> None:
        super().__init__("json", "", 0.05)
        self.free = threading.Event()

    def open(self, run_dir: Path, config: Mapping[str, object]) -> None:
        self.free.wait(300)

    def write(self, train_step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


def test_a_server_that_never_answers_keeps_no_run_waiting(tmp_path: Path) -> None:
    tracker = Stuck()
    tracker.start(tmp_path, {})
    for step in range(100):
        tracker.log(METRICS, train_step=step, policy_version=0)
    with pytest.raises(TimeoutError, match=r"not written within 0\.05 s"):
        tracker.close()
    tracker.close()
    tracker.free.set()
    for thread in [t for t in threading.enumerate() if t.name == "json tracker"]:
        thread.join()  # the test's timeout ends the wait
