"""A tracker that remembers what it got, for tests in the same process."""

from collections.abc import Mapping
from pathlib import Path

from rollart_core.contracts.tracker import Tracker

LOGGED: list[tuple[int, Mapping[str, float]]] = []


class Remembers(Tracker):
    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        assert config["data"]

    def log(self, metrics: Mapping[str, float], *, train_step: int, policy_version: int) -> None:
        LOGGED.append((train_step, dict(metrics)))

    def close(self) -> None:
        pass
