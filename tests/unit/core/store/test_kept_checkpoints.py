"""The best and the last good checkpoint outlive all that come after them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollart_core.config.load import validate
from rollart_core.config.resolve import resolve_run
from rollart_core.config.run import RunConfig
from rollart_core.errors import ConfigError, TrainerLost
from rollart_core.runtime.validator import (
    ModelDependencies,
    TrainedModel,
    Validator,
    ValidatorDependencies,
)
from rollart_core.scheduling.evaluate import EvaluationResult
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.scheduling.tasks import TaskSource, TaskSourceState
from rollart_core.store.checkpoints import Checkpoints
from rollart_core.store.estimates import wilson
from rollart_core.store.recorder import CheckpointPlan, RunRecorder
from rollart_core.store.run_dir import RunState, checkpoint_folder
from rollart_core.types import Task, Ticket, Trajectory


def taken(checkpoints: Checkpoints, run_dir: Path, version: int) -> list[int]:
    """Take a checkpoint and return the versions that there are, the newest first."""
    checkpoint_folder(run_dir, version).mkdir(parents=True)
    state = RunState(version, version, TaskSourceState(0), 0, 0, {}, 1.0)
    asyncio.run(checkpoints.finish(state))
    return [int(p.name[1:]) for p in checkpoints.whole()]


def test_marked_checkpoints_are_not_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, print)
    assert taken(checkpoints, tmp_path, 0) == [0]
    checkpoints.mark("best", 0, {"value": 0.5})
    checkpoints.mark("good", 0, {})
    assert taken(checkpoints, tmp_path, 1) == [1, 0]
    checkpoints.mark("best", 1, {"value": 0.6})
    assert checkpoints.marks() == {"best": 1, "good": 0}
    assert taken(checkpoints, tmp_path, 2) == [2, 1, 0]
    checkpoints.mark("good", 2, {})
    assert taken(checkpoints, tmp_path, 3) == [3, 2, 1]
    assert Checkpoints(tmp_path, 1, print).marks() == {"best": 1, "good": 2}
    assert checkpoints.has(1)
    assert not checkpoints.has(0)


class Trainer:
    """Its weights are a version; it may be lost over a call."""

    def __init__(self) -> None:
        self.version = 0
        self.lost_over: list[str] = []
        self.log: list[object] = []

    async def call(self, method: str, path: str, *args: Any, **kwargs: Any) -> None:
        if method in self.lost_over:
            self.lost_over.remove(method)
            raise TrainerLost("it is gone")
        if method == "save":
            Path(path).mkdir(parents=True)
            (Path(path) / "weights").write_text(str(self.version))
            return
        if method == "load":
            self.version = int((Path(path) / "weights").read_text())
        self.log.append((method, self.version))

    async def restart(self) -> None:
        self.version = -1

    async def publish(self, policy_version: int) -> None:
        self.log.append(("publish", policy_version))

    async def load_weights(self, policy_version: int) -> list[Any]:
        self.log.append(("engines", policy_version))
        return []


def config(**changes: Any) -> RunConfig:
    mapping = {
        "env": "rollart_testing:FakeEnv",
        "model": {"kind": "new"},
        "trackers": [],
        "stop": {"batches": 2},
        "evaluation": {"every_batches": 1},
        "checkpoint": {"keep": 1, "keep_best": "validation/score"},
    }
    found, wrong = validate(mapping | changes)
    assert found is not None
    assert not wrong
    return found


class Run:
    """Validates versions with given scores, one after the other, and settles on a model."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.config = config(**changes)
        self.trainer = Trainer()
        self.said: list[str] = []
        self.recorder = RunRecorder(resolve_run(self.config), folder, NobodyWatches())
        self.recorder.notify = self.said.append  # type: ignore[method-assign]
        self.recorder.start()
        source = TaskSource("env", "train", 5, 0)
        self.recorder.plan(CheckpointPlan(self.trainer.call, source))
        self.score = 0.0
        tasks = [Task("env", "warm", i, i) for i in range(2)]
        self.validator = Validator(
            self.config, ValidatorDependencies(self.recorder, tasks, self.attempt)
        )

    async def attempt(self, version: int, ticket: Ticket) -> Trajectory:
        return Trajectory(ticket, "finished", reward=self.score, score=self.score)

    async def validates(self, *scores: float, begin: int = 0) -> list[str | None]:
        reasons = []
        for version, score in enumerate(scores, begin):
            self.trainer.version, self.score = version, score
            reasons.append(await self.validator.validate(version))
        await self.recorder.checkpoint(self.trainer.version)
        return reasons

    async def model(self) -> TrainedModel:
        self.trainer.log.clear()
        parts = ModelDependencies(self.recorder, self.trainer, self.trainer, self.said.append)
        found = TrainedModel(self.config, parts)
        await found.settle()
        await found.export("model")
        return found


async def settled(run: Run, *scores: float, begin: int) -> TrainedModel:
    await run.validates(*scores, begin=begin)
    return await run.model()


def ended(run: Run, *scores: float, begin: int = 0) -> TrainedModel:
    try:
        return asyncio.run(settled(run, *scores, begin=begin))
    finally:
        run.recorder.close({})


BROUGHT = [("load", 1), ("publish", 1), ("engines", 1), ("export_hf", 1)]


def test_the_trained_model_is_that_of_the_best_validation(tmp_path: Path) -> None:
    run = Run(tmp_path)
    model = ended(run, 0.2, 0.8, 0.7, 0.3)
    assert run.trainer.log == BROUGHT
    facts = model.facts()
    assert facts["model_policy_version"] == facts["best"]["policy_version"] == 1
    assert facts["last"]["policy_version"] == 3
    assert facts["choice"] == "version 1, the best of 4 validations by validation/score"
    assert run.said[-1].startswith("WARNING: validation/score fell from 0.800 at policy version 1")
    assert run.said[-1].endswith("The trained model has the weights of version 1.")


def test_the_last_model_is_kept_where_it_is_the_best_or_where_nobody_asks(tmp_path: Path) -> None:
    run = Run(tmp_path / "best")
    model = ended(run, 0.2, 0.8)
    assert run.trainer.log == [("export_hf", 1)]
    assert "the last and the best of 2" in model.facts()["choice"]
    run = Run(tmp_path / "last", checkpoint={"keep": 1})
    model = ended(run, 0.8, 0.2)
    assert run.trainer.log == [("export_hf", 1)]
    assert model.facts()["best"]["policy_version"] == 0
    assert "set checkpoint.keep_best" in run.said[-1]


@pytest.mark.parametrize("method", ["load", "export_hf"])
def test_a_trainer_that_is_lost_comes_back_with_the_best(tmp_path: Path, method: str) -> None:
    run = Run(tmp_path)
    run.trainer.lost_over = [method]
    ended(run, 0.2, 0.8, 0.3)
    assert run.trainer.log[-1] == ("export_hf", 1)


def test_a_best_checkpoint_that_is_damaged_leaves_the_last_model(tmp_path: Path) -> None:
    run = Run(tmp_path)

    async def damaged() -> TrainedModel:
        await run.validates(0.2, 0.8, 0.3)
        (checkpoint_folder(tmp_path, 1) / "weights").unlink()
        return await run.model()

    try:
        model = asyncio.run(damaged())
    finally:
        run.recorder.close({})
    assert run.trainer.log[-1] == ("export_hf", 2)
    assert model.facts()["model_policy_version"] == 2
    assert any("v000001 cannot be loaded (weights is missing)" in said for said in run.said)


def test_training_ends_when_the_value_is_reached_as_often_as_asked(tmp_path: Path) -> None:
    when = {"metric": "validation/score", "value": 0.7, "patience": 2}
    run = Run(tmp_path, stop={"batches": 9, "when": when})
    try:
        reasons = asyncio.run(run.validates(0.8, 0.2, 0.7, 0.9))
    finally:
        run.recorder.close({})
    assert [reason is not None for reason in reasons] == [False, False, False, True]


def test_a_validation_that_is_cancelled_counts_for_nothing_and_is_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path)

    async def main() -> str | None:
        began = asyncio.Event()

        async def hangs(version: int, ticket: Ticket) -> Trajectory:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

        tasks = [Task("env", "warm", 0, 0)]
        run.validator = Validator(run.config, ValidatorDependencies(run.recorder, tasks, hangs))
        validating = asyncio.ensure_future(run.validator.validate(1))
        await began.wait()
        run.validator.cancel()
        return await validating

    try:
        assert asyncio.run(main()) is None
    finally:
        run.recorder.close({})
    assert not run.recorder.validations.all
    assert not run.validator.is_due(2)


def test_weights_that_an_earlier_process_did_not_keep_are_not_the_best(tmp_path: Path) -> None:
    """As when a run goes on with ``checkpoint.keep_best`` that began without it."""
    run = Run(tmp_path)
    share = wilson(2, 2)
    run.recorder.validations.add(0, EvaluationResult(share, share, 0, 0, 1.0, 1.0))
    model = ended(run, 0.2, 0.5, begin=1)
    assert run.recorder.checkpoints.marks() == {"best": 2}
    assert model.facts()["best"]["policy_version"] == 2


def test_a_metric_that_the_environment_does_not_have_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint={"keep_best": "validation/success"})
    with pytest.raises(ConfigError, match="no environment of this run reports"):
        ended(run, 0.5)
