"""Rewards in the loop: real scheduler, controller, journal and reward service; the rest are fakes.

And one whole run, with a backend that fails in every way.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from support.clock import VirtualLoop, run_virtual
from support.lineage_run import FakeEngines, FakeTrainer

from rollart_bench import async_
from rollart_core.config.load import validate
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.errors import EpisodeError, UserError
from rollart_core.rewards.service import RewardService
from rollart_core.runtime.run_envs import RunEnvs
from rollart_core.runtime.train_phase import TrainDependencies, TrainPhase
from rollart_core.scheduling.events import StopRun
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from rollart_core.store.recorder import RunRecorder
from rollart_core.types import Failure, FailureKind, Sample, Ticket, Trajectory, Turn
from rollart_plugins.serverless.function import RewardFunction
from rollart_plugins.serverless.serve_command import Listening, application

ENV = "rollart_testing:FakeEnv"
FAULTY = "rollart_testing:FaultyBackend"
GROUP = "rollart_testing:FakeGroupReward"
CONFIG: dict[str, Any] = {
    "name": "scoring",
    "max_staleness": 1,
    "model": {"kind": "new"},
    "env": ENV,
    "reward": "env-return",
    "trackers": [],
    "rollout": {"groups_per_batch": 2, "group_size": 4, "max_concurrent": 4},
    "failures": {"max_retries": 0, "max_rate": 1.0},
    "checkpoint": {"every_batches": 100},
    "stop": {"batches": 12},
}
FAULTS = {"errors": 0.1, "hangs": 0.05, "garbage": 0.02, "outage_s": [0.1, 0.5], "mean_s": 0.005}
FAULTY_CALLS = {"error": (10, 3), "hang": (20, 7), "garbage": (50, 11)}
"""Every so-many-th call, and the first of them."""
QUICK = {"backoff_s": 0.01, "max_backoff_s": 0.02, "breaker": {"open_s": 0.05}}


def resolved(**changes: object) -> ResolvedRun:
    config, problems = validate(CONFIG | changes)
    assert config is not None, problems
    assert not problems
    return resolve_run(config)


class EnvSlots:
    """Runs episodes that only take time, and counts who plays and who waits."""

    episode_s = 0.002

    def __init__(self, service: RewardService, run: ResolvedRun) -> None:
        self.score = service.scorer(run.envs[0].reward)
        self.playing = self.most_playing = self.open = self.most_open = 0
        self.rng = random.Random(0)

    async def run_episode(self, ticket: Ticket, start_version: int) -> Trajectory:
        self.open += 1
        self.playing += 1
        self.most_playing = max(self.most_playing, self.playing)
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(self.episode_s)
        self.playing -= 1
        returned = 0.25 + 0.5 * self.rng.random()
        messages = ({"role": "user", "content": "go"},)
        task = ticket.task
        request = RewardRequest(
            ticket.ticket_id,
            task.env_id,
            task.split,
            task.index,
            messages,  # type: ignore[arg-type]
            returned,
            None,
            attempt=ticket.attempt,
        )
        try:
            result = await self.score(request)
        except EpisodeError as e:
            return Trajectory(ticket, "failed", failure=e.failure(), start_version=start_version)
        finally:
            self.open -= 1
        return _trajectory(ticket, start_version, returned, result)


def _trajectory(ticket: Ticket, version: int, returned: float, result: RewardResult) -> Trajectory:
    row = np.full(3, version, np.int32)
    sample = Sample(row, np.ones(3, np.bool_), row.astype(np.float32), row, row)
    turn = Turn("see", "do", 1, 2, "stop", returned, 0.0, 0.0)
    return Trajectory(
        ticket,
        "finished",
        (sample,),
        (turn,),
        result.value,
        returned,
        None,
        start_version=version,
    )


async def phase(
    run: ResolvedRun, folder: Path, hear: Callable[[str], None] | None = None
) -> tuple[EnvSlots, StopRun, RewardService]:
    envs, trainer = RunEnvs(run), FakeTrainer(random.Random(0))
    service = envs.scoring
    slots = EnvSlots(service, run)
    recorder = RunRecorder(run, folder, NobodyWatches())
    recorder.start()

    def notify(kind: str, payload: Mapping[str, object]) -> None:
        recorder.event(kind, payload)
        if hear is not None:
            hear(kind)

    service.on_event = notify
    source = TaskSource(ENV, "train", 64, 0)
    parts = TrainDependencies(recorder, trainer, FakeEngines(), slots.run_episode, source, service)
    training = TrainPhase(run, parts)
    try:
        await service.open()
        await training.prepare(None)
        stop = await training.execute(None)
    finally:
        await envs.close()
        recorder.close({})
    return slots, stop, service


def train(folder: Path, **changes: object) -> tuple[EnvSlots, StopRun, RewardService]:
    """Train under a virtual clock: no deadline is missed for what else the machine does."""
    return run_virtual(phase(resolved(**changes), folder))


def test_nothing_is_lost_or_scored_for_a_failure_and_every_retry_is_told(tmp_path: Path) -> None:
    scoring = {**QUICK, "backend": {"id": FAULTY, **FAULTS}, "try_s": 0.1}
    _, stop, service = train(tmp_path, scoring=scoring)
    assert stop.kind == "done"
    trajectories = list(read_trajectories(tmp_path))
    finished = [t for t in trajectories if t.failure is None]
    assert {t.failure.kind for t in trajectories if t.failure} <= {"cancelled"}
    assert len(finished) >= 12 * 8
    assert all(t.reward == t.score for t in finished)
    with JournalReader(tmp_path) as journal:
        told = Counter(event.kind for event in journal.events())
    (numbers,) = service.totals().values()
    assert numbers["broken"] > 15
    assert told["reward_retry"] == numbers["retries"] == numbers["broken"]
    assert told["reward_breaker_opened"] == told["reward_breaker_closed"] >= 1
    assert told["reward_failed"] == told["LoseTicket"] == 0
    assert audit(tmp_path).ok


class FaultyFunction:
    """A reward as an HTTP function, on a server that fails in every way and is away for a while."""

    def __init__(self) -> None:
        self._down = False
        self._noticed = asyncio.Event()
        self.faults = Counter[str]()
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = application(RewardFunction("env-return", {}), Listening())

        @web.middleware
        async def through(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._through(request, handler)

        app.middlewares.append(through)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        outage = asyncio.create_task(self._outage(runner, site))
        try:
            yield
        finally:
            outage.cancel()
            await asyncio.gather(outage, return_exceptions=True)
            await runner.cleanup()

    async def _outage(self, runner: web.AppRunner, site: web.TCPSite) -> None:
        while self.faults["none"] < 20:
            await asyncio.sleep(0.01)
        self._down = True
        await site.stop()
        await self._noticed.wait()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self._down = False

    def hear(self, kind: str) -> None:
        if self._down and kind == "reward_breaker_opened":
            self._noticed.set()

    async def _through(self, request: web.Request, handler: Any) -> web.StreamResponse:
        number = self.faults.total()
        kind = next((k for k, (every, at) in FAULTY_CALLS.items() if number % every == at), "none")
        if self._down:
            assert request.transport is not None
            request.transport.close()
            kind = "down"
        self.faults[kind] += request.method == "POST"
        if request.method != "POST" or kind == "none":
            response: web.StreamResponse = await handler(request)
            return response
        if kind == "hang":
            await asyncio.sleep(60)
        return web.Response(status=503 if kind == "error" else 200, text="<html>")


def test_the_same_holds_for_a_function_behind_http(tmp_path: Path) -> None:
    function = FaultyFunction()

    async def main() -> tuple[EnvSlots, StopRun, RewardService]:
        async with function.serving():
            backend = {"id": "http", "url": f"http://127.0.0.1:{function.port}"}
            scoring = {**QUICK, "backend": backend, "try_s": 1.0, "max_tries": 10}
            return await phase(resolved(scoring=scoring), tmp_path, function.hear)

    _, stop, service = asyncio.run(main())
    assert stop.kind == "done"
    assert {"error", "hang", "garbage"} <= set(function.faults)
    trajectories = list(read_trajectories(tmp_path))
    assert {t.failure.kind for t in trajectories if t.failure} <= {"cancelled"}
    finished = [t for t in trajectories if t.failure is None]
    assert len(finished) >= 12 * 8
    assert all(t.reward == pytest.approx(t.score) for t in finished)
    with JournalReader(tmp_path) as journal:
        told = Counter(event.kind for event in journal.events())
    (numbers,) = service.totals().values()
    assert told["reward_retry"] == numbers["broken"]
    assert told["reward_breaker_opened"] >= 1
    seen = sum(function.faults[kind] for kind in FAULTY_CALLS)
    assert numbers["broken"] > seen, "nobody noticed the outage"
    assert told["reward_failed"] == told["LoseTicket"] == 0


def test_a_dead_backend_fails_the_trajectories_and_stops_the_run_with_its_name(
    tmp_path: Path,
) -> None:
    scoring = {**QUICK, "backend": {"id": FAULTY, "errors": 1.0}, "max_tries": 2}
    scoring["breaker"] = None
    failures = {"max_retries": 0, "max_rate": 0.5, "window": 8}
    _, stop, _ = train(tmp_path, scoring=scoring, failures=failures)
    assert stop.kind == "failures"
    assert f"reward rollart/EnvReturn-v1 on {FAULTY}: 503: no instance is free" in stop.reason
    assert all(t.reward is None for t in read_trajectories(tmp_path))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_place_is_for_who_plays(tmp_path: Path, overlap: bool) -> None:
    scoring = {"backend": {"id": FAULTY, "mean_s": 0.03}, "overlap": overlap}
    slots, stop, _ = train(tmp_path, scoring=scoring, stop={"batches": 3})
    assert stop.kind == "done"
    assert slots.most_playing <= 4
    assert (slots.most_open > 4) == overlap


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_group_is_scored_whole_with_fewer_places_than_members(tmp_path: Path, mode: str) -> None:
    rollout = {"groups_per_batch": 2, "group_size": 4, "max_concurrent": 3, "redundant": 1}
    scoring = {**QUICK, "backend": {"id": FAULTY, "errors": 0.2}, "fallback": "inline"}
    changes = {"mode": mode} | ({"max_staleness": 2} if mode == "async" else {})
    base = {key: value for key, value in CONFIG.items() if key != "max_staleness"}
    config, problems = validate(
        base
        | {"reward": GROUP, "scoring": scoring, "rollout": rollout, "stop": {"batches": 6}}
        | changes
    )
    assert config is not None, problems
    run = resolve_run(config)
    _, stop, service = asyncio.run(phase(run, tmp_path))
    assert stop.kind == "done"
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in read_trajectories(tmp_path):
        if trajectory.failure is None:
            groups.setdefault(trajectory.ticket.group_id, []).append(trajectory)
    whole = [group for group in groups.values() if len(group) == 4]
    assert len(whole) >= 12
    for group in whole:
        ranked = sorted(group, key=lambda t: t.score or 0.0)
        assert [t.reward for t in ranked] == [0.0, 1 / 3, 2 / 3, 1.0]
    (numbers,) = service.totals().values()
    assert numbers["scores"] == 4 * (numbers["invocations"] - numbers["broken"])


def test_no_group_waits_for_who_fails_after_it_was_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, rng = EnvSlots.run_episode, random.Random(3)

    async def play_and_judge(slots: EnvSlots, ticket: Ticket, start_version: int) -> Trajectory:
        """Play, and have a teacher speak of it who now and then has nothing to say."""
        trajectory = await play(slots, ticket, start_version)
        await asyncio.sleep(0.01 * rng.random())
        if trajectory.failure is not None or rng.random() > 0.2:
            return trajectory
        failure = Failure(FailureKind.INFERENCE, "teacher", "it has nothing to say")
        return Trajectory(ticket, "failed", failure=failure, start_version=start_version)

    monkeypatch.setattr(EnvSlots, "run_episode", play_and_judge)
    failures = {"max_retries": 2, "max_rate": 1.0}
    scoring = {"backend": {"id": FAULTY}}
    _, stop, _ = train(tmp_path, reward=GROUP, scoring=scoring, failures=failures)
    assert stop.kind == "done"
    checked = audit(tmp_path)
    assert checked.ok, checked.violations
    assert set(checked.lost) == {"inference"}  # and none of them of a timeout


def test_scores_beside_the_rollout_take_little_more_than_half_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EnvSlots, "episode_s", 0.3)
    backend = {"id": FAULTY, "mean_s": 2.0, "sigma": 1.0, "seed": 1}
    rollout = {"groups_per_batch": 4, "group_size": 8, "max_concurrent": 16}
    took: list[float] = []
    for overlap in (True, False):
        scoring = {"backend": backend, "overlap": overlap, "hedge": {}, "max_concurrent": 256}
        run = resolved(
            scoring=scoring,
            rollout=rollout,
            max_staleness=3,
            stop={"batches": 8},
            deadlines={"reward_s": 120.0},
        )
        folder = tmp_path / str(overlap)
        folder.mkdir()
        loop = VirtualLoop()
        with asyncio.Runner(loop_factory=lambda made=loop: made) as runner:
            runner.run(phase(run, folder))
            took.append(loop.time() / 8)
    assert took[0] < 0.6 * took[1], took


def test_a_case_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="case: 'slow' is none of slow-reward, reward-faults"):
        async_.run({"case": "slow"})


def test_step_times_pair_the_runs_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"overlapped": 1.0, "blocking": 2.0, "sync": 4.0}

    def fake(function: str, asked: dict[str, Any]) -> dict[str, float]:
        return {"step_s": took[asked["mode"]]}

    monkeypatch.setattr(async_, "in_fresh_process", fake)
    blocking, sync = async_.run({"case": "slow-reward", "rounds": 2})["rows"]  # type: ignore[misc]
    assert (blocking["ratio"]["median"], blocking["meets_mark"]) == (2.0, True)
    assert (sync["ratio"]["median"], sync["mark"]) == (4.0, None)
