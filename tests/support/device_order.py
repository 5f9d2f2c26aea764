"""Who uses the devices of a run with ``runtime.colocate``: the calls to trainer and engines."""

from __future__ import annotations

from typing import Any

import pytest

from rollart_core.runtime.process import WorkerProcess

CALLS = ("generate", "sleep", "wake", "load_weights", "offload", "reload")
TRAINER_CALLS = ("train_batch", "publish", "compare", "save", "load", "export_hf")
BATCH = ["generate", "sleep", "reload", "train_batch", "publish", "offload", "wake"]
"""One batch, whose weights are generated with afterwards."""


class DeviceOrder:
    """Records the calls to the processes of trainer and engines; equal ones in a row count once.

    Checks that no call comes to a side that does not have the devices.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.wrong: list[str] = []
        self.workers: list[WorkerProcess] = []
        """Those that were called, the latest first."""
        self._asleep: set[str] = set()
        call = WorkerProcess.call

        async def recorded(worker: WorkerProcess, method: str, *args: Any, **kwargs: Any) -> Any:
            if worker not in self.workers:
                self.workers.insert(0, worker)
                self._asleep.discard(worker.name)  # a new process
            if method in CALLS + TRAINER_CALLS:
                self._record(worker.name, method)
            return await call(worker, method, *args, **kwargs)

        monkeypatch.setattr(WorkerProcess, "call", recorded)

    def _record(self, name: str, method: str) -> None:
        if not self.calls or self.calls[-1] != method:
            self.calls.append(method)
        if method in ("sleep", "offload"):
            self._asleep.add(name)
        elif method in ("wake", "reload"):
            self._asleep.discard(name)
        elif name in self._asleep:
            self.wrong.append(f"{method} of {name}, which has no device now")

    def num_batches(self) -> int:
        """Return how often the calls of a whole batch came one after the other."""
        size = len(BATCH)
        starts = range(len(self.calls) - size + 1)
        return sum(self.calls[i : i + size] == BATCH for i in starts)
