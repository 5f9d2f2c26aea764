"""The W&B tracker with the real package: in files, and where no server answers."""

import builtins
import math
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
    why = "" if has_key else "no API key"
    with pytest.warns(RuntimeWarning, match=rf"W&B is not available \(.*{why}.*wandb sync") as seen:
        tracker.start(tmp_path, {})
    assert len(seen) == 1
    tracker.log({"train/loss": 0.5}, train_step=1, policy_version=0)
    tracker.close()
    wandb.teardown()
    assert any(b"train/loss" in content for content in files(tmp_path))


def mode_of_a_run(monkeypatch: pytest.MonkeyPatch, run_dir: Path, server: str) -> str:
    """Begin a run with a package that always succeeds; return the mode it was begun in."""
    begun: list[str] = []

    def init(*, mode: str, **_: object) -> SimpleNamespace:
        begun.append(mode)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    fake = SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        WandbTracker(server=server).start(run_dir, {})
    return begun[-1]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a key."""
    for name in ("NETRC", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_key(path: Path, machine: str, mode: int = 0o600) -> None:
    path.write_text(f"machine {machine}\n  login user\n  password {'0' * 40}\n")
    path.chmod(mode)


@pytest.mark.parametrize(
    ("server", "machine"),
    [
        ("http://localhost:8080", "localhost:8080"),
        ("https://wandb.example.org", "wandb.example.org"),
        ("https://api.forge.coreweave.com", "api.wandb.ai"),
    ],
)
def test_a_key_is_found_under_the_host_that_wandb_looks_for(home, monkeypatch, server, machine):
    assert mode_of_a_run(monkeypatch, home, server) == "offline"
    write_key(home / ".netrc", machine)
    assert mode_of_a_run(monkeypatch, home, server) == "online"


@pytest.mark.parametrize(
    ("name", "mode", "given"),
    [(".netrc", 0o644, ""), ("_netrc", 0o600, ""), ("keys", 0o600, "~/keys")],
)
def test_a_key_is_found_in_the_file_that_wandb_opens(home, monkeypatch, name, mode, given):
    write_key(home / name, "localhost", mode)
    monkeypatch.setenv("NETRC", given)
    assert mode_of_a_run(monkeypatch, home, "http://localhost") == "online"


def test_a_key_of_another_port_is_none(home, monkeypatch):
    write_key(home / ".netrc", "localhost")
    assert mode_of_a_run(monkeypatch, home, "http://localhost:8080") == "offline"


@pytest.mark.parametrize("content", ["machine", "machine localhost login user"])
def test_a_file_without_a_whole_key_has_none(home, monkeypatch, content):
    (home / ".netrc").write_text(content)
    (home / ".netrc").chmod(0o600)
    assert mode_of_a_run(monkeypatch, home, "http://localhost") == "offline"
