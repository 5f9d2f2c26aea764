"""When training ends, the engines hold the newest version: the evaluation that follows plays it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from support.lineage_run import CONFIG, ENV, FakeTrainer, episodes

from rollart_core.config.load import validate
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.inference import WeightSwap
from rollart_core.errors import InferenceFailure, TrainerLost
from rollart_core.runtime.train_phase import TrainDependencies, TrainPhase
from rollart_core.scheduling.events import StopRun
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.store.recorder import RunRecorder

NUM_BATCHES = 3


class Run:
    """Training of a few batches, whose last load does what a test says."""

    def __init__(self, folder: Path, last_load: Callable[[], Awaitable[None]]) -> None:
        changes = {"stop": {"batches": NUM_BATCHES}, "checkpoint": {"every_batches": 100}}
        config, problems = validate(CONFIG | changes)
        assert config is not None, problems
        self.version = 0
        self.stopped = asyncio.Event()
        self._last_load = last_load
        self.recorder = RunRecorder(resolve_run(config), folder, NobodyWatches())
        self.recorder.start()
        rng = random.Random(0)
        parts = TrainDependencies(
            recorder=self.recorder,
            trainer=FakeTrainer(rng),
            engines=self,
            run_episode=episodes(self, rng, 0.0),
            source=TaskSource(ENV, "train", 37, 0),
        )
        self.phase = TrainPhase(resolve_run(config), parts)

    async def load_weights(self, policy_version: int) -> Sequence[WeightSwap]:
        if policy_version == NUM_BATCHES:
            await self._last_load()
        self.version = policy_version
        return []

    async def execute(self) -> StopRun:
        decided = self.recorder.decided

        def notice(action: object) -> None:
            decided(action)
            if isinstance(action, StopRun):
                self.stopped.set()

        self.recorder.decided = notice
        try:
            await self.phase.prepare(None)
            return await self.phase.execute(None)
        finally:
            self.recorder.close({})


def test_training_ends_once_the_engines_hold_the_newest_version(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def last_load() -> None:
            await gate.wait()

        run = Run(tmp_path, last_load)
        training = asyncio.create_task(run.execute())
        await run.stopped.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not training.done(), "it did not wait for the last load"
        assert run.version < NUM_BATCHES
        gate.set()
        assert (await training).kind == "done"
        assert run.version == NUM_BATCHES

    asyncio.run(main())


def test_a_last_load_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async def last_load() -> None:
            await run.stopped.wait()
            raise InferenceFailure("the disk is full")

        run = Run(tmp_path, last_load)
        with pytest.raises(InferenceFailure, match="the disk is full"):
            await run.execute()

    asyncio.run(main())


def test_a_trainer_that_is_lost_over_the_last_load_is_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        num_loads = 0

        async def last_load() -> None:
            nonlocal num_loads
            num_loads += 1
            if num_loads == 1:
                await run.stopped.wait()
                run.phase.fail(TrainerLost("gone"))
                await asyncio.Event().wait()  # nobody sends these weights any more

        run = Run(tmp_path, last_load)
        assert (await run.execute()).kind == "done"
        assert (num_loads, run.version) == (2, NUM_BATCHES)

    asyncio.run(main())
