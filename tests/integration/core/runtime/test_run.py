"""Whole runs through ``launch``: real engine, trainer and env processes, a tiny model."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support import fork_server
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
from rollart_core.errors import ConfigError, TooManyFailures
from rollart_core.runtime.launch import launch
from rollart_core.scheduling.tasks import hold_out
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader, read_trajectories
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
    with JournalReader(run_dir) as journal:
        trained = [b.batch for b in journal.batches() if b.state == "trained"]
    assert sorted(trained) == list(range(num_batches))


def test_what_always_fails_is_not_trained_on(tmp_path):
    broken = {"id": "rollart_testing:FaultyBackend", "errors": 1.0}
    with pytest.raises(TooManyFailures, match=r"before training: 100% of the last 3.*reward"):
        run(
            tmp_path,
            scoring={"backend": broken, "max_tries": 1},
            failures={"window": 3, "max_rate": 0.5},
        )
    assert not left_behind()
