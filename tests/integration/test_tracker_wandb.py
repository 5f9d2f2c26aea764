"""The W&B tracker with the real package: in files, and where no server answers."""

import builtins
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart_plugins.trackers.wandb import WandbTracker


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The package, with no account, and nothing running of it afterwards."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    package = pytest.importorskip("wandb", reason="wandb is in rollart[wandb]")
    yield package
    package.teardown()


def files(run_dir: Path) -> list[bytes]:
    """What has been written, oldest first."""
    found = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    return [p.read_bytes() for p in sorted(found, key=lambda p: p.stat().st_mtime_ns)]


def test_log_wants_start():
    with pytest.raises(RuntimeError, match="start"):
        WandbTracker(mode="offline").log({}, train_step=0, policy_version=0)


def test_a_missing_wandb_says_how_to_install_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "wandb":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'rollart\[wandb\]'"):
        WandbTracker().start(tmp_path, {})


@pytest.mark.timeout(300)
def test_metrics_and_config_reach_the_files_and_a_resume_is_the_same_run(wandb, tmp_path):
    run_dir = tmp_path / "hello-1"
    run_dir.mkdir()
    for step in (1, 2):
        tracker = WandbTracker(mode="offline", project="gym", tags=("tagged",))
        tracker.start(run_dir, {"algorithm": {"id": "a-known-algorithm"}})
        metrics = {"train/loss": 0.5, "train/odd": math.nan}
        tracker.log(metrics, train_step=step, policy_version=step - 1)
        tracker.close()
        tracker.close()
    wandb.teardown()  # as at the end of the process
    written = files(run_dir)
    assert len(written) == 2
    run_id = (run_dir / "wandb" / "run-id").read_bytes().strip()
    for content in written:
        for known in (b"train/loss", b"a-known-algorithm", b"tagged", b"gym", b"hello-1", run_id):
            assert known in content
        assert b"train/odd" not in content


@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_key", [False, True])
def test_where_no_server_answers_metrics_go_to_files_with_one_warning(
    wandb, has_key, tmp_path, monkeypatch
):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{closed.getsockname()[1]}"
    if has_key:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    tracker = WandbTracker(server=server, timeout_s=1.0)
    why = "" if has_key else "there is no key"
    with pytest.warns(RuntimeWarning, match=rf"W&B cannot be used \(.*{why}.*wandb sync") as seen:
        tracker.start(tmp_path, {})
    assert len(seen) == 1
    tracker.log({"train/loss": 0.5}, train_step=1, policy_version=0)
    tracker.close()
    wandb.teardown()
    assert any(b"train/loss" in content for content in files(tmp_path))
