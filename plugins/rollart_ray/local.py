"""A Ray cluster of this machine alone, for one run: its folder, its token, its environment.

Takes: nothing. Gives: what Ray is started with, and a place for what it writes. Never: opens a port
to other machines, runs without a token, or leaves its folder behind (one that was killed is removed
by the next run).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "rollart-ray-"
OBJECT_STORE_BYTES = 256 << 20
"""Batches pass through it, and nothing that is larger: weights have channels of their own."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""As on macOS and Windows: Ray uses the loopback address, and does not replace it by another."""
_NICENESS = "RAY_worker_niceness"
HEALTH_LOOKS = 3
"""So many looks a node may miss before it is dead."""


class LocalFolder:
    """The folder of one local cluster: short, since sockets lie in it, and this person's alone."""

    def __init__(self) -> None:
        root = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
        remove_orphans(root)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        self.token = self.path / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32), encoding="ascii")

    @property
    def temp_dir(self) -> str:
        """Where Ray keeps logs and sockets (it makes that folder open to all)."""
        return str(self.path / "r")

    def environment(self) -> dict[str, str]:
        """Return the variables that Ray's processes and this one need."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            **LOOPBACK,
            "RAY_USAGE_STATS_ENABLED": "0",
            # There is no dashboard to read them, and a process that has lost a node or the head
            # waits half a minute at its end to send them.
            "RAY_enable_metrics_collection": "0",
            "RAY_task_events_report_interval_ms": "0",
            # By default actors give way to all else; ours are the work that the run waits for.
            _NICENESS: os.environ.get(_NICENESS, "0"),
        }

    def remove(self) -> None:
        """Remove it with all that Ray left in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_orphans(root: Path) -> None:
    """Remove the folders of clusters whose run is gone; Ray's processes went with it."""
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(ValueError, PermissionError):
            pid = int(folder.name.removeprefix(_PREFIX).partition("-")[0])
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)


def health_settings(health_check_s: float | None) -> dict[str, int]:
    """Return Ray's settings for how soon a silent node is dead; none: Ray's own."""
    if health_check_s is None:
        return {}
    every_ms = max(1, round(health_check_s * 1000))
    return {
        "health_check_initial_delay_ms": every_ms,
        "health_check_period_ms": every_ms,
        "health_check_timeout_ms": every_ms,
        "health_check_failure_threshold": HEALTH_LOOKS,
    }


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Have these environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
