"""Whole runs through ``launch``: real engine, trainer and env processes, a tiny model."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support import fork_server
from support.run_parts import part_pids
from support.whole_runs import (
    ENV,
    left_behind,
    losses,
    num_trained,
    run,
    start,
    tokens,
    wait_for_batches,
    write,
)

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.errors import ConfigError, TooManyFailures
from rollart_core.runtime.interrupts import EXIT_CODES, PREEMPTED
from rollart_core.runtime.launch import launch
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.scheduling.tasks import hold_out
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from rollart_core.store.recorder import RunRecorder
from rollart_view.diagnosis.diagnose import diagnose


def test_a_run_trains_reports_and_leaves_nothing_behind(tmp_path):
    validates = {"evaluation": {"every_batches": 2, "validation_tasks": 12}}
    report = run(tmp_path, **validates, checkpoint={"keep_best": "validation/score"})
    assert report.ok
    assert (report.batches, report.train_steps + report.skipped_updates) == (3, 3)
    assert [v["policy_version"] for v in report.validations] == [0, 2, 3]
    assert report.best is not None
    assert report.model_policy_version == report.best["policy_version"]
    holdout = hold_out(ENV, "train", 64, 12, None)
    held = {holdout.held(i) for i in range(12)}
    assert not held & {t.ticket.task.index for t in read_trajectories(Path(report.run_dir))}
    assert report.before is not None
    assert report.before.success.n == 4
    assert max(map(int, report.staleness)) <= 1
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    diagnosis = diagnose(Path(report.run_dir))
    assert (diagnosis.num_batches, diagnosis.last_version, diagnosis.too_short) == (3, 2, True)
    assert diagnosis.ended == report.stop_reason
    assert report.placement["trainer"] == "local"
    plain = json.loads((Path(report.run_dir) / "report.json").read_text())
    wanted = {"run_dir", "success_before", "success_after", "score_before", "score_after"}
    wanted |= {"train_steps", "wall_s", "tokens_per_s", "staleness", "failures"}
    assert wanted <= plain.keys()
    assert (Path(report.run_dir) / "model-trained" / "tokenizer.json").exists()
    assert not left_behind()


@pytest.mark.slow
def test_no_staleness_and_the_synchronous_loop_have_the_same_losses_bit_for_bit(tmp_path):
    """Though the processes of one start as outside of tests: each hashes strings in its own way."""
    delayed = {"env": {"delay_s": 0.02, "delay_sigma": 1.0}, "deterministic": True}
    with fork_server.normally():
        sync = run(tmp_path / "sync", mode="sync", max_staleness=None, **delayed)
    again = run(tmp_path / "async", mode="async", max_staleness=0, **delayed)
    assert len(losses(sync)) == 3
    assert any(loss != 0 for loss in losses(sync))
    assert losses(sync) == losses(again)
    assert tokens(sync) == tokens(again)


def test_deterministic_runs_repeat_under_random_delays_and_failures(tmp_path):
    delayed = {"env": {"delay_s": 0.02}, "deterministic": True, "max_staleness": 0}
    plain = run(tmp_path / "plain", deterministic=True, max_staleness=0)
    slow = run(tmp_path / "slow", **delayed)
    assert losses(plain) == losses(slow)
    assert any(loss != 0 for loss in losses(plain))


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        pytest.param({"trouble": "raise", "at": 1}, "environment", marks=pytest.mark.slow),
        pytest.param({"trouble": "nan", "at": 1}, "environment", marks=pytest.mark.slow),
        pytest.param({"trouble": "raise", "at": "reset"}, "environment", marks=pytest.mark.slow),
        ({"trouble": "hang", "at": 1}, "timeout"),
    ],
)
def test_a_run_goes_on_where_an_environment_does_wrong(tmp_path, trouble, kind):
    report = run(
        tmp_path,
        env={**trouble, "trouble_every": 4, "id": "rollart_testing:FakeEnv"},
        deadlines={"step_s": 0.3} if trouble["trouble"] == "hang" else {},
        failures={"max_rate": 0.9},
    )
    assert report.ok
    assert report.batches == 3
    assert set(report.failures) == {kind}
    checked = audit(Path(report.run_dir))
    assert checked.ok, checked.violations
    failed = [t for t in read_trajectories(Path(report.run_dir)) if t.failure]
    assert failed
    assert all(t.reward is None for t in failed)


@pytest.mark.slow
def test_a_run_that_only_fails_stops_and_says_why(tmp_path):
    report = run(
        tmp_path,
        env={"trouble": "raise", "at": 0},
        failures={"window": 8, "max_rate": 0.5},
        evaluation={"tasks": 1},
    )
    assert not report.ok
    assert "RuntimeError: trouble on demand" in report.stop_reason


@pytest.mark.slow
def test_a_megabyte_of_text_ends_one_episode_and_no_more(tmp_path):
    report = run(tmp_path, env={"trouble": "huge", "at": 0, "trouble_every": 3})
    assert report.ok
    assert report.batches == 3
    assert not report.failures


def test_a_mapper_that_cannot_place_the_run_stops_it_before_anything_starts(tmp_path):
    mapper = {"id": "rollart_testing:FakeMapper", "pool": "mars"}
    with pytest.raises(ConfigError, match="mars"):
        run(tmp_path, mapper=mapper)


@pytest.mark.slow
def test_ctrl_c_ends_in_order_and_keeps_everything(tmp_path):
    changes = {"stop": {"batches": 100_000}, "env": {"delay_s": 0.01}, "reward": None}
    path = write(tmp_path, changes)
    process = start(path)
    run_dir = wait_for_batches(tmp_path / "runs", 2, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    report = json.loads(out)
    assert report["ok"] is False
    assert report["batches"] >= 2
    assert audit(run_dir).ok
    # Nothing of it is undone when it goes on: what had been trained is in a checkpoint.
    assert (run_dir / "checkpoints" / f"v{report['batches']:06d}" / "run_state.json").exists()
    assert not list(Path("/dev/shm").glob(f"rollart-run-{process.pid}-*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preempted_run_saves_its_last_version_and_goes_on_from_it(tmp_path, number):
    """A cluster may signal all processes, more than once; nothing but the checkpoint is written."""
    changes = {
        "reward": None,
        "stop": {"batches": 100_000},
        "checkpoint": {"every_batches": 100_000},
        "evaluation": {"every_batches": 100_000, "validation_tasks": 4},
    }
    process = start(write(tmp_path, changes))
    run_dir = wait_for_batches(tmp_path / "runs", 2, process)
    workers = part_pids(run_dir)
    assert workers.keys() == {"engine", "env", "trainer"}
    for pid in (*(pid for pids in workers.values() for pid in pids), process.pid, process.pid):
        os.kill(pid, number)
    out, _ = process.communicate()
    assert process.returncode == EXIT_CODES[PREEMPTED] == 75
    report = json.loads(out)
    assert (report["ok"], report["stop_reason"]) == (False, PREEMPTED)
    last = report["batches"]
    assert (run_dir / "checkpoints" / f"v{last:06d}" / "run_state.json").exists()
    assert num_trained(run_dir) == last
    assert not (run_dir / "model-trained").exists()
    assert audit(run_dir).ok
    config = load_config(run_dir / "config.yaml", [f"stop.batches={last + 1}"])
    resumed = launch(resolve_run(config), resume=run_dir)
    assert (resumed.ok, resumed.batches) == (True, last + 1)
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert checked.batches_rolled_back == 0
    assert not part_pids(run_dir)


def test_a_run_that_is_preempted_during_its_set_up_ends_with_the_same_code(tmp_path):
    process = start(write(tmp_path, {"reward": None}))
    while not list((tmp_path / "runs").glob("*/journal.db")):  # signals are handled from then on
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == EXIT_CODES[PREEMPTED]
    assert "preempted outside of training" in err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_resumes_from_its_checkpoint(tmp_path):
    changes = {
        "reward": None,
        "stop": {"batches": 100_000},
        "env": {"delay_s": 0.05},
        "checkpoint": {"every_batches": 2},
    }
    path = write(tmp_path, changes)
    process = start(path)
    run_dir = wait_for_batches(tmp_path / "runs", 3, process)
    process.kill()
    process.communicate()
    num_batches = num_trained(run_dir) + 1
    config = load_config(run_dir / "config.yaml", [f"stop.batches={num_batches}"])
    report = launch(resolve_run(config), resume=run_dir)
    assert report.ok
    checked = audit(run_dir)
    assert checked.ok, checked.violations
    assert report.score_gain is not None, "the evaluation before the kill is lost"
    assert report.batches == checked.batches == num_batches
    assert report.rolled_back.get("batches", 0) == checked.batches_rolled_back
    assert report.failures == checked.failures
    assert report.envs[ENV]["finished"] == checked.attempts - checked.unrecorded
    with JournalReader(run_dir) as journal:
        trained = [b.batch for b in journal.batches() if b.state == "trained"]
    assert sorted(trained) == list(range(num_batches))


def test_a_resumed_run_reports_and_shows_the_whole_run(tmp_path):
    shown: list[tuple[float | None, float | str]] = []

    class Shows(NobodyWatches):
        def progress(self, fraction, line):
            if "batch" in line:
                shown.append((fraction, line["batch"]))

    trouble = {"trouble": "raise", "at": 1, "trouble_every": 5, "id": "rollart_testing:FakeEnv"}
    changes = {"env": trouble, "failures": {"max_rate": 0.9}}
    first = run(tmp_path, **changes)
    assert first.before is not None
    path = write(tmp_path, {**changes, "stop": {"batches": 5}})
    run_dir = Path(first.run_dir)
    second = launch(resolve_run(load_config(path)), resume=run_dir, observer=Shows())
    assert second.before is not None
    assert second.before.scores == first.before.scores
    assert second.score_gain is not None
    assert (second.batches, second.train_steps + second.skipped_updates) == (5, 5)
    assert shown == [(0.8, 4), (1.0, 5)]
    assert sum(second.staleness.values()) == 5 * 2 * 4
    assert second.wall_s > first.wall_s
    assert second.train_wall_s > first.train_wall_s
    assert 0 < 5 * sum(second.step_s.values()) <= second.train_wall_s
    checked = audit(run_dir)
    assert second.failures == checked.failures
    (name,) = second.envs
    assert second.envs[name]["finished"] > first.envs[name]["finished"] > 0
    for name in ("finished_tokens_mean", "trained_tokens_mean"):
        assert second.length_bias[name] == pytest.approx(checked.length_bias[name])


def test_equal_rewards_are_said_during_the_run_and_in_its_report(tmp_path):
    said: list[str] = []

    class Hears(NobodyWatches):
        def message(self, text):
            said.append(text)

    path = write(tmp_path, {"reward": f"{__name__}:Zero", "stop": {"batches": 4}})
    report = launch(resolve_run(load_config(path)), observer=Hears())
    (warning,) = [text for text in said if "Warning: the rewards" in text]
    assert "first 3 batches are equal (mean 0)" in warning
    assert "warm_start" in warning
    assert report.has_signal is False
    assert run(tmp_path / "other").has_signal


class Zero(Reward):
    def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(0.0)


def test_other_held_out_tasks_after_a_resume_are_not_compared(tmp_path):
    first = run(tmp_path)
    second = run(tmp_path, Path(first.run_dir), stop={"batches": 4}, evaluation={"tasks": 3})
    assert second.before is None
    assert second.score_gain is None


def test_a_kill_before_the_first_evaluation_ends_is_made_good(tmp_path, monkeypatch):
    monkeypatch.setattr(RunRecorder, "evaluated", _killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    monkeypatch.undo()
    (run_dir,) = (tmp_path / "runs").iterdir()
    report = run(tmp_path, run_dir)
    assert report.before is not None
    assert report.score_gain is not None


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_always_fails_is_not_trained_on(tmp_path):
    broken = {"id": "rollart_testing:FaultyBackend", "errors": 1.0}
    with pytest.raises(TooManyFailures, match=r"before training: 100% of the last 3.*reward"):
        run(
            tmp_path,
            scoring={"backend": broken, "max_tries": 1},
            failures={"window": 3, "max_rate": 0.5},
        )
    assert not left_behind()
