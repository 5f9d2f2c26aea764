"""While the trainer is started again, a run can still be ended."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollart_core.errors import ClusterLost, TrainerLost
from rollart_core.runtime.remote import Restarts
from rollart_core.runtime.train_phase import TrainPhase


class NeverBack:
    """A trainer that does not come up again."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def restart(self) -> None:
        self.asked.set()
        await asyncio.Event().wait()


def phase_with(trainer: NeverBack) -> Any:
    """Return a phase that trains, as far as a restart of the trainer has to do with it."""
    phase: Any = object.__new__(TrainPhase)
    recorder = SimpleNamespace(event=lambda *_: None, notify=lambda *_: None)
    phase._deps = SimpleNamespace(trainer=trainer, recorder=recorder)
    phase._restarts = Restarts(3, 600.0)
    phase._controller = phase._restoring = phase._failure = None
    phase._running = True
    return phase


def test_the_loss_of_the_cluster_ends_a_restart_at_once():
    async def main() -> None:
        trainer = NeverBack()
        phase = phase_with(trainer)
        restored = asyncio.create_task(phase._restored(TrainerLost("its node is gone")))
        await trainer.asked.wait()
        phase.fail(TrainerLost("again"))
        await asyncio.sleep(0)
        assert not restored.done()
        phase.fail(ClusterLost("the cluster is gone"))
        with pytest.raises(ClusterLost, match="the cluster is gone"):
            await restored

    asyncio.run(main())


def test_the_first_ctrl_c_does_not_wait_for_a_restart():
    async def main() -> None:
        trainer = NeverBack()
        phase = phase_with(trainer)
        assert phase.running
        restored = asyncio.create_task(phase._restored(TrainerLost("gone")))
        await trainer.asked.wait()
        assert not phase.running  # so that a signal cancels the run
        restored.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restored
        assert phase.running

    asyncio.run(main())
