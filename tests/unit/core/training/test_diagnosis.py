"""What a diagnosis finds in series: each fault by its name, and nothing in sound runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.metric_series import FAULTS, HEALTHY, Curve, Run, collapse, healthy

from rollart_view.diagnosis.diagnose import diagnose, find
from rollart_view.diagnosis.findings import ADVICE, KINDS
from rollart_view.diagnosis.history import BUSY, Series
from rollart_view.diagnosis.series import (
    find_fall,
    last_run_above,
    mostly_above,
    noise,
    trend,
)

SEEDS = range(3)


def kinds(run: Run) -> list[str]:
    return [finding.kind for finding in find(run.history())]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_nothing_else(fault: str, seed: int) -> None:
    assert kinds(FAULTS[fault](seed)) == [fault]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_sound_run_has_no_findings(name: str, seed: int) -> None:
    assert kinds(healthy(seed, HEALTHY[name])) == []


def test_there_is_a_fault_and_advice_for_each_kind() -> None:
    assert set(FAULTS) == set(KINDS) == set(ADVICE)


def test_a_run_of_less_than_twenty_batches_has_no_findings() -> None:
    run = healthy(0, Curve(start=0.9, end=0.97))
    for name in ("rollout/success_mean", "rollout/reward_mean"):
        run.metrics[name][12:] = 0.1
    assert find(run.history().before(19)) == ()
    assert [finding.kind for finding in find(run.history().before(21))] == ["collapse"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_onset_and_the_largest_update_of_a_collapse(seed: int) -> None:
    (found,) = find(collapse(seed).history())
    assert found.severity == "error"
    assert abs(found.first_version - 201) <= 3
    assert found.numbers["largest_update"] == 202
    assert (found.last_version, found.keys[0].key) == (299, "trainer.lr")


def test_a_fall_that_recovers_is_a_warning_and_hides_nothing_after_it() -> None:
    run = healthy(0, Curve(end=0.97, rise=0.1))
    for name in ("rollout/success_mean", "rollout/reward_mean"):
        run.metrics[name][150:160] *= 0.3
    run.metrics["time/trainer_waited_s"] *= 5
    found = {finding.kind: finding for finding in find(run.history())}
    assert set(found) == {"collapse", "starved_trainer"}
    assert found["collapse"].severity == "warning"
    assert 148 <= found["collapse"].first_version < found["collapse"].last_version <= 165


def test_what_follows_a_collapse_is_not_a_finding_of_its_own() -> None:
    run = collapse(0)
    run.metrics["train/effective_sample_size"][202:] = 0.1
    run.metrics["train/logprob_diff_fresh_mean"][202:] = 1.0
    assert kinds(run) == ["collapse"]


def test_a_fall_of_success_alone_is_no_collapse() -> None:
    run = collapse(0)
    run.metrics["rollout/reward_mean"] = np.linspace(0.2, 0.9, 300)
    assert "collapse" not in kinds(run)


def test_zero_advantage_drop_is_advised_against_after_a_collapse() -> None:
    history = collapse(0).history()
    config = {**history.config, "algorithm": {"zero_advantage": "drop"}}
    (found,) = find(replace(history, config=config))
    assert found.keys[0].key == "algorithm.zero_advantage"


def test_of_equal_validations_the_latest_is_the_best(tmp_path: Path) -> None:
    run = healthy(0, Curve(start=0.9, end=0.97))
    run.validation = {50: 0.5, 100: 0.9, 150: 0.9, 200: 0.8}
    run.write(tmp_path)
    summary = diagnose(tmp_path).summary
    assert [
        line
        for line in summary
        if line.startswith("The best of 4 validations is 90.0%, at policy_version 150;")
    ]


def test_a_run_without_success_is_judged_by_its_reward() -> None:
    run = collapse(0)
    run.metrics["rollout/success_mean"][:] = 0.0
    run.validation = {}
    (found,) = find(run.history())
    assert found.kind == "collapse"
    assert found.evidence[0].startswith("Reward fell")


def test_equal_rewards_are_no_fault_once_the_tasks_are_solved() -> None:
    run = healthy(0)
    run.set_success(np.full(300, 0.995), spread=0.1)
    assert np.mean(run.metrics["train/zero_advantage_groups"]) > 7
    assert kinds(run) == []


def test_groups_that_were_replaced_for_equal_rewards_count() -> None:
    history = replace(healthy(0).history(), num_groups=300)
    assert find(replace(history, dropped={"equal": 300}, success=0.05)) == ()
    (found,) = find(replace(history, dropped={"equal": 2700}, success=0.05))
    assert (found.kind, round(found.numbers["live_share"], 2)) == ("vanishing_signal", 0.1)
    assert find(replace(history, dropped={"equal": 2700}, success=0.97)) == ()


def test_dropped_groups_show_staleness() -> None:
    history = replace(healthy(0).history(), num_groups=2400)
    assert find(replace(history, dropped={"too_stale": 60})) == ()
    (found,) = find(replace(history, dropped={"too_stale": 600}))
    assert (found.kind, found.numbers["dropped_share"]) == ("staleness", 0.2)


def test_rollouts_that_run_seldom_are_starved_and_busy_ones_are_not() -> None:
    run = healthy(0)
    run.metrics["time/trainer_waited_s"] *= 0.005
    history = run.history()
    for share, expected in ((0.15, ["starved_rollouts"]), (0.9, [])):
        busy = {**history.series, BUSY: Series(history.versions, np.full(300, share))}
        assert [f.kind for f in find(replace(history, series=busy))] == expected


def test_one_outlier_is_no_fall_and_noise_does_not_see_it() -> None:
    values = np.full(100, 0.9) + np.random.default_rng(0).normal(0, 0.02, 100)
    before = noise(values)
    values[50] = 0.0
    assert find_fall(values, num_samples=64) is None
    assert noise(values) == pytest.approx(before, rel=0.1)


def test_noise_leaves_out_a_trend() -> None:
    values = np.random.default_rng(0).normal(0, 0.1, 2000)
    assert noise(values) == pytest.approx(0.1, rel=0.1)
    assert noise(values + np.linspace(0, 50, 2000)) == pytest.approx(0.1, rel=0.1)


def test_a_slow_fall_is_found_where_it_begins() -> None:
    rng = np.random.default_rng(0)
    level = np.concatenate([np.full(200, 0.9), np.linspace(0.9, 0.4, 200)])
    found = find_fall(level + rng.normal(0, 0.03, 400), num_samples=64)
    assert found is not None
    assert 195 <= found.onset <= 230
    assert not found.has_recovered


def test_trend_of_noise_a_line_and_too_little() -> None:
    values = np.random.default_rng(0).normal(0, 1, 240)
    flat = trend(values)
    assert flat is not None
    assert not flat.rises
    assert not flat.falls
    up = trend(values + np.linspace(0, 10, 240))
    assert up is not None
    assert up.rises
    assert up.gain == pytest.approx(10, abs=1)
    assert up.gain < up.gain_high
    assert trend(values[:7]) is None


def test_the_sign_test_needs_ten_values_and_a_clear_majority() -> None:
    assert not mostly_above(np.full(9, 1.0), 0.5)
    assert mostly_above(np.full(10, 1.0), 0.5)
    assert not mostly_above(np.repeat([0.0, 1.0], 50), 0.5)


def test_last_run_above() -> None:
    values = np.concatenate([np.ones(10), np.zeros(10), np.ones(10)])
    assert last_run_above(values, 0.5) == 20
    assert last_run_above(np.ones(30), 0.5) == 0


def test_a_warm_start_that_exists_is_not_advised_to_be_added():
    run = FAULTS["vanishing_signal"](0)
    (finding,) = find(run.history())
    assert "warm_start" in {advice.key for advice in finding.keys}
    history = run.history()
    (finding,) = find(replace(history, config={**history.config, "warm_start": {"lr": 3e-3}}))
    keys = {advice.key: advice.suggestion for advice in finding.keys}
    assert "warm_start" not in keys
    assert keys["warm_start.until_success"].startswith("raise it")
