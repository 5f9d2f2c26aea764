"""A run that the guard undoes goes back to a good checkpoint under new versions, if killed or not.

Scheduler, controller, recorder, journal and checkpoints are the real ones; the trainer does what a
script says. What it calls its weights is the list of all that it was trained on.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.lineage_run import CONFIG, ENV, NUM_TASKS, FakeEngines, FakeTrainer, episodes

from rollart_core.config.load import load_config
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.contracts.weights import Publication
from rollart_core.errors import ConfigError, TrainingDiverged
from rollart_core.runtime.train_phase import TrainDependencies, TrainPhase
from rollart_core.scheduling.events import StopRun
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.scheduling.tasks import TaskSource, TaskSourceState
from rollart_core.store.audit import AuditReport, audit
from rollart_core.store.checkpoints import Checkpoints
from rollart_core.store.journal_reader import JournalReader
from rollart_core.store.recorder import RunRecorder
from rollart_core.store.run_dir import RunState
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group, Trajectory
from rollart_view.plot import read_course

Fault = Callable[["ScriptedTrainer", str, int], None]
"""May raise: gets the trainer, the method, and how often it was called."""


class Killed(BaseException):
    """The process is gone, as far as the run is concerned."""


class ScriptedTrainer(FakeTrainer):
    """Its n-th batches (from 0) have a loss that is no number; a fault may come before any call."""

    def __init__(self, bad: set[int], fault: Fault | None = None) -> None:
        super().__init__(random.Random(0))
        self.bad = bad
        self.fault = fault
        self.calls: dict[str, int] = {}
        self.published: list[int] = []

    def count(self, method: str) -> int:
        number = self.calls[method] = self.calls.get(method, -1) + 1
        if self.fault is not None:
            self.fault(self, method, number)
        return number

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        number = self.count("train_batch")
        await super().train_batch(groups, policy_version)
        loss = math.nan if number in self.bad else 0.5
        return [TrainStepReport(policy_version + 1, policy_version, {"loss": loss})]

    async def publish(self, policy_version: int) -> Publication:
        self.count("publish")
        self.published.append(policy_version)
        return await super().publish(policy_version)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.count(method)
        return await super().call(method, *args, **kwargs)


class Told(NobodyWatches):
    """Keeps messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def resolved(folder: Path, **changes: Any) -> ResolvedRun:
    path = folder / "config.yaml"
    defaults = {"guard": {"window": 2}, "stop": {"batches": 16}}
    path.write_text(yaml.safe_dump(CONFIG | defaults | changes))
    return resolve_run(load_config(path))


async def train(
    run: ResolvedRun, folder: Path, trainer: ScriptedTrainer, told: Told, run_episode: Any = None
) -> tuple[StopRun, dict[str, Any]]:
    """Train from the beginning, or from where the last process was cut off, as a launch does."""
    resumes = (folder / "journal.db").exists()
    recorder = RunRecorder(run, folder, told)
    recorder.start()
    state = await recorder.load_newest(trainer.call) if resumes else None
    engines = FakeEngines()
    engines.version = state.policy_version if state else 0
    run_episode = run_episode or episodes(engines, random.Random(1), 0.0)
    source = TaskSource(ENV, "train", NUM_TASKS, 0)
    phase = TrainPhase(run, TrainDependencies(recorder, trainer, engines, run_episode, source))
    try:
        await phase.prepare(state)
        stop = await phase.execute(state)
        return stop, recorder.totals()["guard"]
    finally:
        recorder.close({})


def trained(
    folder: Path, trainer: ScriptedTrainer, told: Told | None = None, **changes: Any
) -> tuple[StopRun, dict[str, Any]]:
    return asyncio.run(train(resolved(folder, **changes), folder, trainer, told or Told()))


def check(folder: Path, trainer: ScriptedTrainer) -> AuditReport:
    """The final weights were trained on what the journal says, each ticket once; nothing undone."""
    report = audit(folder)
    assert report.ok, report.violations
    assert report.open == 0
    with JournalReader(folder) as journal:
        live = [b for b in journal.batches() if b.state == "trained"]
        discarded = {t.ticket_id for t in journal.tickets() if t.state == "discarded_by_guard"}
    members = [
        [b.batch, t, a]
        for b in sorted(live, key=lambda b: b.batch)
        for t, a in zip(b.ticket_ids, b.attempts, strict=True)
    ]
    assert trainer.weights == members
    assert discarded.isdisjoint(ticket for _, ticket, _ in members)
    assert len(discarded) == report.discarded_by_guard
    return report


def batches_of(trainer: ScriptedTrainer) -> list[int]:
    return sorted({int(str(batch)) for batch, _, _ in trainer.weights})


@pytest.mark.parametrize("mode", [{"mode": "sync"}, {"max_staleness": 1}, {"max_staleness": 3}])
def test_a_trip_goes_back_and_leaves_out_what_was_trained_since(
    tmp_path: Path, mode: dict[str, Any]
) -> None:
    trainer, told = ScriptedTrainer(bad={9}), Told()
    config = {k: v for k, v in CONFIG.items() if k != "max_staleness"} | mode
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config | {"guard": {"window": 2}, "stop": {"batches": 16}}))
    run = resolve_run(load_config(path))
    stop, guard = asyncio.run(train(run, tmp_path, trainer, told))
    assert stop.kind == "done"
    report = check(tmp_path, trainer)
    # Checkpoints are of versions 0, 4 and 8; that of 8 is less than 2 batches old.
    assert batches_of(trainer) == [0, 1, 2, 3, *range(11, 16)]
    assert trainer.published == [*range(1, 17)]
    assert report.discarded_by_guard == 6 * 4
    assert report.batches_rolled_back == 6
    assert (trainer.lr_factor, guard["lr_factor"], guard["rollbacks"]) == (0.5, 0.5, 1)
    (trip,) = guard["trips"]
    assert (trip["rule"], trip["value"]) == ("not_finite", None)
    assert (trip["policy_version"], trip["back_to"], trip["as_version"]) == (9, 4, 11)
    assert report.guard == ("at version 9: train/loss is nan",)
    assert report.went_back == ("to version 4: the guard tripped: train/loss is nan",)
    (message,) = [m for m in told.messages if "guard" in m]
    assert "goes back to the checkpoint of version 4" in message
    assert "0.5 times the learning rate (rollback 1 of at most 3)" in message
    assert read_course(tmp_path).rollbacks == (4,)
    newest = Checkpoints(tmp_path, 2, print).whole()
    assert [p.name for p in newest[:2]] == ["v000016", "v000012"]
    assert "v000008" not in [p.name for p in newest]
    assert RunState.read(newest[0]).lr_factor == 0.5


def test_a_run_that_trips_too_often_ends_with_good_weights_and_says_why(tmp_path: Path) -> None:
    trainer, told = ScriptedTrainer(bad={6, 9, 12}), Told()
    guard = {"window": 2, "max_rollbacks": 2, "lr_factor": 0.1}
    stop, report = trained(tmp_path, trainer, told, guard=guard, stop={"batches": 40})
    assert stop.kind == "guard"
    assert "guard.max_rollbacks (2) are used up" in stop.reason
    assert "train/loss is nan" in stop.reason
    assert check(tmp_path, trainer).ended == stop.reason
    assert (report["rollbacks"], len(report["trips"])) == (2, 3)
    assert report["lr_factor"] == pytest.approx(0.01)
    assert batches_of(trainer) == list(range(report["trips"][0]["back_to"]))
    # More rollbacks are allowed: the same run goes on.
    again = ScriptedTrainer(bad=set())
    stop, report = trained(tmp_path, again, guard=guard | {"max_rollbacks": 9})
    assert stop.kind == "done"
    assert (again.lr_factor, report["rollbacks"]) == (pytest.approx(0.01), 3)
    check(tmp_path, again)


def test_the_last_batches_are_undone_too_and_the_end_says_so(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(bad={15})
    stop, _ = trained(tmp_path, trainer)
    assert stop.kind == "done"
    check(tmp_path, trainer)
    assert batches_of(trainer) == list(range(12))
    other = tmp_path / "other"
    other.mkdir()
    trainer = ScriptedTrainer(bad={15})
    stop, _ = trained(other, trainer, guard={"window": 2, "max_rollbacks": 0})
    assert stop.kind == "guard"
    check(other, trainer)


def diverges(at: int) -> Fault:
    def fault(trainer: ScriptedTrainer, method: str, number: int) -> None:
        if (method, number) == ("train_batch", at):
            raise TrainingDiverged("3 updates in a row were not finite")

    return fault


def test_updates_that_are_not_finite_end_a_run_only_without_a_guard(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(set(), diverges(9))
    _, guard = trained(tmp_path, trainer)
    assert guard["trips"][0]["rule"] == "diverged"
    report = check(tmp_path, trainer)
    assert batches_of(trainer) == [0, 1, 2, 3, *range(10, 16)]
    assert report.discarded_by_guard == 6 * 4
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(TrainingDiverged):
        trained(other, ScriptedTrainer(set(), diverges(9)), guard="off")


def lost_at(method: str, number: int) -> Fault:
    def fault(trainer: ScriptedTrainer, called: str, count: int) -> None:
        if (called, count) == (method, number):
            trainer.lost = True

    return fault


AFTER_THE_TRIP = (("load", 0), ("publish", 10), ("save", 3))
"""Of a run that trips at batch 9: calls before and after it goes back. There are checkpoints of
versions 0, 4 and 8 by then, and versions up to 10 were published."""


@pytest.mark.parametrize(("method", "number"), AFTER_THE_TRIP)
def test_a_trainer_that_is_lost_after_a_trip_is_no_trip_forgotten(
    tmp_path: Path, method: str, number: int
) -> None:
    trainer = ScriptedTrainer({9}, lost_at(method, number))
    stop, guard = trained(tmp_path, trainer)
    assert stop.kind == "done"
    check(tmp_path, trainer)
    assert batches_of(trainer) == [0, 1, 2, 3, *range(11, 16)]
    assert (trainer.lr_factor, guard["rollbacks"]) == (0.5, 1)
    with JournalReader(tmp_path) as journal:
        assert journal.num_events("trainer_lost") == 1


@pytest.mark.parametrize("used_up", [False, True])
@pytest.mark.parametrize(("method", "number"), AFTER_THE_TRIP)
def test_a_run_that_is_killed_after_a_trip_carries_it_out_when_it_goes_on(
    tmp_path: Path, method: str, number: int, used_up: bool
) -> None:
    def fault(trainer: ScriptedTrainer, called: str, count: int) -> None:
        if (called, count) == (method, number):
            raise Killed

    guard = {"window": 2, "max_rollbacks": 0 if used_up else 3}
    with pytest.raises(Killed):
        trained(tmp_path, ScriptedTrainer({9}, fault), guard=guard)
    assert audit(tmp_path).ok
    trainer = ScriptedTrainer(set())
    stop, report = trained(tmp_path, trainer, guard=guard)
    checked = check(tmp_path, trainer)
    assert stop.kind == ("guard" if used_up else "done")
    rest = [] if used_up else range(11, 16)
    assert batches_of(trainer) == [0, 1, 2, 3, *rest]
    assert checked.discarded_by_guard == 6 * 4
    assert min(trainer.published) == 11
    assert report["lr_factor"] == trainer.lr_factor == (1.0 if used_up else 0.5)


def test_a_trip_whose_new_checkpoint_is_damaged_is_not_forgotten(tmp_path: Path) -> None:
    """The run falls back to one from before the trip, and uses no version twice."""
    keeps = {"every_batches": 4, "keep": 9}
    trained(tmp_path, ScriptedTrainer({5}), stop={"batches": 10}, checkpoint=keeps)
    whole = Checkpoints(tmp_path, 9, print).whole()
    assert [p.name for p in whole] == ["v000010", "v000008", "v000007", "v000000"]
    for folder in whole[:-1]:
        (folder / "weights.json").write_text("damaged")
    trainer = ScriptedTrainer(set())
    trained(tmp_path, trainer, stop={"batches": 20})
    report = check(tmp_path, trainer)
    assert min(trainer.published) == 11
    assert trainer.lr_factor == 0.5
    assert (report.batches_rolled_back, report.discarded_by_guard) == (6 + 3, 6 * 4)


def test_a_guard_that_is_to_watch_success_where_there_is_none_ends_the_run(tmp_path: Path) -> None:
    async def run_episode(ticket: Any, start_version: int) -> Trajectory:
        engines = FakeEngines()
        engines.version = start_version
        whole = await episodes(engines, random.Random(1), 0.0)(ticket, start_version)
        parts = (whole.samples, whole.turns, 1.0, 1.0, None)
        return Trajectory(ticket, "finished", *parts, start_version=start_version)

    for watch, refused in (("success", True), (None, False)):
        folder = tmp_path / str(watch)
        folder.mkdir()
        run = resolved(folder, guard={"watch": watch}, stop={"batches": 2})
        training = train(run, folder, ScriptedTrainer(set()), Told(), run_episode)
        if refused:
            with pytest.raises(ConfigError, match=r"guard\.watch is success, but no environment"):
                asyncio.run(training)
        else:
            assert asyncio.run(training)[0].kind == "done"


def test_a_checkpoint_from_before_there_was_a_guard_loads(tmp_path: Path) -> None:
    state = RunState(4, 4, TaskSourceState(0), 0, 0, {}, 1.0)
    tmp_path.joinpath("run_state.json").write_text("")
    state.write(tmp_path, {})
    content = json.loads((tmp_path / "run_state.json").read_text())
    del content["guard"], content["lr_factor"]
    (tmp_path / "run_state.json").write_text(json.dumps(content))
    assert RunState.read(tmp_path) == state


def test_checkpoints_that_are_old_enough_are_kept_and_undone_ones_are_removed(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, 1, print, guard_window=8)

    def versions() -> list[int]:
        return [int(p.name[1:]) for p in checkpoints.whole()]

    async def save(version: int) -> None:
        (tmp_path / "checkpoints" / f"v{version:06d}").mkdir(parents=True)
        await checkpoints.finish(RunState(version, version, TaskSourceState(0), 0, 0, {}, 1.0))

    async def work() -> None:
        for version in range(31):
            await save(version)
            assert len(versions()) <= 3
            assert checkpoints.last_good(version) <= max(0, version - 8)
            assert checkpoints.last_good(version) >= version - 18
        kept = versions()
        checkpoints.mark("good", kept[1], {})
        assert checkpoints.last_good(2) == kept[1]  # it passed, whatever looked wrong before
        await checkpoints.discard(kept[2], kept[0])
        assert versions() == [kept[0], kept[2]]
        assert not (tmp_path / "checkpoints" / f"v{kept[1]:06d}").exists()
        assert checkpoints.last_good(40) == kept[0]  # what is marked is not there
        assert checkpoints.last_good(2) == kept[2]  # none is older

    asyncio.run(work())


def test_a_lost_trainer_without_a_trip_is_as_before(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(set(), lost_at("train_batch", 6))
    stop, guard = trained(tmp_path, trainer)
    assert stop.kind == "done"
    assert guard == {"trips": [], "rollbacks": 0, "lr_factor": 1.0}
    assert batches_of(trainer) == list(range(16))
    assert check(tmp_path, trainer).discarded_by_guard == 0
