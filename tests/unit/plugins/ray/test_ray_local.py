"""The folder, token and settings of a Ray cluster of one's own, without Ray."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollart_ray import local as ray_local


def test_the_folder_and_the_token_are_this_persons_alone() -> None:
    folder, other = ray_local.LocalFolder(), ray_local.LocalFolder()
    try:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.token.stat().st_mode) == 0o600
        said = folder.environment()
        assert said["RAY_AUTH_MODE"] == "token"
        assert Path(said["RAY_AUTH_TOKEN_PATH"]).read_text() == folder.token.read_text()
        assert folder.token.read_text() != other.token.read_text()
        socket = (
            f"{folder.temp_dir}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
        )
        assert len(socket) < 104  # what a socket's path may have on macOS
    finally:
        folder.remove()
        other.remove()
    assert not folder.path.exists()


def test_what_a_killed_run_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1, check=True
    )
    gone = tmp_path / f"rollart-ray-{int(ended.stdout)}-x"
    alive, foreign = tmp_path / f"rollart-ray-{os.getpid()}-y", tmp_path / "rollart-ray-notes"
    for folder in (gone, alive, foreign):
        folder.mkdir()
    ray_local.remove_orphans(tmp_path)
    assert (gone.exists(), alive.exists(), foreign.exists()) == (False, True, True)


def test_variables_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_TRIED", "before")
    monkeypatch.delenv("ROLLART_UNSET", raising=False)
    with ray_local.variables({"ROLLART_TRIED": "now", "ROLLART_UNSET": "now"}):
        assert (os.environ["ROLLART_TRIED"], os.environ["ROLLART_UNSET"]) == ("now", "now")
    assert os.environ["ROLLART_TRIED"] == "before"
    assert "ROLLART_UNSET" not in os.environ


def test_how_soon_a_silent_node_is_dead() -> None:
    assert ray_local.health_settings(None) == {}
    found = ray_local.health_settings(0.5)
    assert found["health_check_period_ms"] * found["health_check_failure_threshold"] == 1500
