"""What the guard undoes, and what it leaves alone: series of metrics, without a run."""

from __future__ import annotations

import lzma
import math
import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rollart_core.config.evaluation import Guard as GuardConfig
from rollart_core.config.evaluation import GuardLimits
from rollart_core.store.metrics import repeated_share
from rollart_core.training.guard import Guard, Trip, of_batch
from rollart_core.types import Sample

ROOT = Path(__file__).resolve().parents[4]
COLLAPSE = "shared/data/collapse/journal.db.xz"
Series = list[dict[str, float]]


def healthy(seed: int, *, num_batches: int = 600, scores: str = "success") -> Series:
    """Return batches of a run that learns: noisy, with heavy tails, and sound."""
    rng, series = random.Random(seed), []
    for i in range(num_batches):
        p = 0.3 + 0.6 * (1 - math.exp(-i / 150))
        hits = [rng.random() < min(1.0, max(0.0, p + rng.gauss(0, 0.2))) for _ in range(8)]
        share = sum(sum(rng.random() < (0.9 if h else 0.1) for _ in range(8)) for h in hits) / 64
        metrics = {
            "rollout/reward_mean": share * 10 - 5,
            "rollout/loss_tokens_mean": 30 * math.exp(rng.gauss(0, 0.2)),
            "rollout/repeated_share": min(1.0, 0.2 * math.exp(rng.gauss(0, 0.3))),
        }
        if scores == "success":
            metrics["rollout/success_mean"] = share
        if rng.random() < 0.9:  # else all advantages are 0
            metrics |= {
                "train/approx_kl": 0.003 * math.exp(rng.gauss(0, 1)),
                "train/is_ratio_max": 1 + 0.3 * math.exp(rng.gauss(0, 1)),
                "train/grad_norm": 0.5 * math.exp(rng.gauss(0, 0.7)),
                "train/entropy": 0.5 * math.exp(-i / 200) * math.exp(rng.gauss(0, 0.4)) + 0.02,
            }
        series.append(metrics)
    return series


def judged(series: Series, config: GuardConfig | None = None) -> dict[int, Trip]:
    """Return the trips by batch."""
    guard = Guard(config or GuardConfig())
    trips = ((i, guard.judge(i, metrics)) for i, metrics in enumerate(series))
    return {i: trip for i, trip in trips if trip}


def broken(*last: Mapping[str, float], flat: bool = False) -> dict[int, Trip]:
    """Return the trips of a sound run of 100 batches that goes on with those given."""
    series = healthy(0)[:100] if not flat else [dict(b) for b in healthy(0)[:100]]
    if flat:
        rng = random.Random(1)
        for metrics in series:
            metrics["rollout/success_mean"] = 0.4 + rng.gauss(0, 0.03)
            metrics["train/entropy"] = 0.4
    return judged([*series, *({**series[-1], **metrics} for metrics in last)])


@pytest.mark.parametrize("scores", ["success", "reward"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_that_learns_is_left_alone(seed: int, scores: str) -> None:
    assert judged(healthy(seed, scores=scores)) == {}


def test_what_is_usual_in_a_run_is_no_trip() -> None:
    """Stale rollouts, and an engine that computes in other precision, are always far away."""
    far = {"train/approx_kl": 0.15, "train/is_ratio_max": 45.0}
    series = [
        {**m, **({k: v * (1 + i % 3) for k, v in far.items()})} for i, m in enumerate(healthy(0))
    ]
    assert judged(series) == {}
    assert {t.rule for t in judged([*series, {**series[-1], "train/approx_kl": 3.0}]).values()} == {
        "kl"
    }


def test_the_run_that_collapsed_is_undone_and_not_before(tmp_path: Path) -> None:
    """1,825 sound batches, then the collapse of issue 18."""
    path = next((p / COLLAPSE for p in ROOT.parents if (p / COLLAPSE).is_file()), None)
    if path is None:
        pytest.skip(f"{COLLAPSE} is not beside this checkout")
    (tmp_path / "journal.db").write_bytes(lzma.decompress(path.read_bytes()))
    names = ["rollout/success_mean", "rollout/reward_mean"]
    names += ["train/approx_kl", "train/is_ratio_max", "train/grad_norm", "train/entropy"]
    names += ["train/not_finite", "train/loss", "rollout/loss_tokens_mean"]
    series: Series = [{} for _ in range(1849)]
    query = f"SELECT policy_version, name, value FROM metrics WHERE name IN {tuple(names)}"
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        for version, name, value in db.execute(query):
            series[version][name] = value
    trips = judged(series[:1836])
    assert 1826 <= min(trips) <= 1834
    assert trips[min(trips)].since_version in range(1829, 1834)
    without_success = [{**m, "rollout/success_mean": 0.5} for m in series]
    assert 1826 <= min(judged(without_success[:1836])) <= 1834


@pytest.mark.parametrize(
    ("rule", "metrics", "num_batches"),
    [
        ("drop", {"rollout/success_mean": 0.0}, 4),
        ("kl", {"train/approx_kl": 0.4}, 1),
        ("ratio", {"train/is_ratio_max": 120.0}, 2),
        ("grad_norm", {"train/grad_norm": 40.0}, 2),
        ("not_finite", {"train/not_finite": 1.0, "train/grad_norm": math.nan}, 2),
        ("not_finite", {"train/loss": math.nan}, 1),
        ("not_finite", {"rollout/reward_mean": math.nan}, 1),
    ],
)
def test_what_is_wrong_trips_its_rule(
    rule: str, metrics: Mapping[str, float], num_batches: int
) -> None:
    trips = broken(*[metrics] * num_batches)
    assert min(trips) in range(100, 100 + num_batches)
    trip = trips[min(trips)]
    assert trip.rule == rule
    assert trip.since_version in range(98, 100 + num_batches)
    assert next(iter(metrics)) in trip.reason or "not finite" in trip.reason


@pytest.mark.parametrize(
    ("rule", "metrics"),
    [
        ("entropy", {"train/entropy": 0.001}),
        ("entropy", {"train/entropy": 6.0}),
        ("repeated", {"rollout/repeated_share": 0.9}),
        ("length", {"rollout/loss_tokens_mean": 200.0}),
        ("length", {"rollout/loss_tokens_mean": 4.0}),
    ],
)
def test_a_policy_that_changed_counts_unless_it_does_better(
    rule: str, metrics: Mapping[str, float]
) -> None:
    trips = broken(*[metrics] * 8, flat=True)
    assert {trip.rule for trip in trips.values()} == {rule}
    assert broken(*[{**metrics, "rollout/success_mean": 1.0}] * 8, flat=True) == {}


def test_one_update_that_was_not_finite_or_was_skipped_is_no_trip() -> None:
    assert broken({"train/not_finite": 1.0, "train/grad_norm": math.inf}, {}) == {}
    assert broken({"train/skipped": 1.0, "train/grad_norm": 99.0}, {}) == {}


@pytest.mark.parametrize("large", [{"train/grad_norm": 40.0}, {"train/is_ratio_max": 165.0}])
def test_a_single_large_gradient_or_ratio_is_clipped_and_no_trip(large: dict[str, float]) -> None:
    """Such as of the KL estimate of a token that became improbable."""
    assert broken(large, *[{}] * 7, large, *[{}] * 7, large) == {}
    assert list(broken(large, *[{}] * 6, large)) == [107]


def test_nothing_is_compared_before_there_is_something_to_compare_with() -> None:
    wild = {"train/approx_kl": 9.0, "train/is_ratio_max": 999.0, "train/grad_norm": 99.0}
    series = [{"rollout/success_mean": float(i % 2), **wild} for i in range(15)]
    assert judged(series) == {}


def test_a_limit_of_none_is_not_watched() -> None:
    fell = [*healthy(0)[:100], *[{**healthy(0)[99], "rollout/success_mean": 0.0}] * 8]
    assert min(judged(fell)) < 104
    assert judged(fell, GuardConfig(limits=GuardLimits(drop=None))) == {}


def test_a_best_of_long_ago_does_not_count_where_tasks_become_harder() -> None:
    series = [{"rollout/success_mean": 0.9 - 0.002 * i + 0.02 * (i % 2)} for i in range(300)]
    for best_over, expected in ((None, True), (64, False)):
        guard = Guard(GuardConfig(), best_over=best_over)
        assert any(guard.judge(i, m) for i, m in enumerate(series)) is expected


def test_a_guard_goes_on_from_what_a_checkpoint_kept() -> None:
    series = [*healthy(0)[:100], *[{"rollout/success_mean": 0.2}] * 4]
    whole, first, second = (Guard(GuardConfig()) for _ in range(3))
    for i, metrics in enumerate(series[:60]):
        whole.judge(i, metrics)
        first.judge(i, metrics)
    second.restore(first.state())
    rest = list(enumerate(series))[60:]
    assert [whole.judge(*b) for b in rest] == [second.judge(*b) for b in rest]
    assert whole.state() == second.state()
    second.restore({})
    assert second.state() == Guard(GuardConfig()).state()


def test_success_to_watch_where_there_is_none_is_an_error_and_else_reward_is_watched() -> None:
    with pytest.raises(
        ValueError, match=r"no environment reports success: set guard\.watch to reward"
    ):
        Guard(GuardConfig(watch="success")).judge(0, {"rollout/reward_mean": 1.0})
    fell = [*healthy(0, scores="reward")[:100], *[{"rollout/reward_mean": -5.0}] * 4]
    assert {trip.rule for trip in judged(fell).values()} == {"drop"}


def test_a_batch_of_several_environments_may_have_none_that_says_success() -> None:
    reward, both = (
        {"rollout/reward_mean": 1.0},
        {"rollout/reward_mean": 1.0, "rollout/success_mean": 1.0},
    )
    for watch in (None, "success"):
        guard = Guard(GuardConfig(watch=watch), is_mixed=True)
        for version, metrics in enumerate([*[reward] * 7, both, *[reward] * 40]):
            assert guard.judge(version, metrics) is None
        assert guard.state()["watch"] == "success"
    never = Guard(GuardConfig(watch="success"), is_mixed=True)
    with pytest.raises(ValueError, match="no environment reports success"):
        for version in range(8):
            never.judge(version, reward)
    assert version == 7
    guard = Guard(GuardConfig(), is_mixed=True)
    fell = [*healthy(0, scores="reward")[:100], *[{"rollout/reward_mean": -5.0}] * 4]
    trips = [guard.judge(version, metrics) for version, metrics in enumerate(fell)]
    assert {trip.rule for trip in trips if trip} == {"drop"}


def test_the_worst_update_of_a_batch_counts() -> None:
    updates = [
        {"approx_kl": 0.1, "entropy": 1.0, "not_finite": 0.0},
        {"approx_kl": 0.3, "entropy": 2.0, "not_finite": 1.0},
    ]
    found = of_batch(updates, {"rollout/success_mean": 0.5})
    assert found["train/approx_kl"] == 0.3
    assert found["train/entropy"] == 1.5
    assert found["train/not_finite"] == 1.0
    assert found["rollout/success_mean"] == 0.5


def sample(tokens: list[int], *, prompt: int = 3) -> Sample:
    ids = np.array([*[7] * prompt, *tokens], np.int32)
    mask = np.arange(len(ids)) >= prompt
    return Sample(ids, mask, np.zeros(len(ids), np.float32), ids, ids)


def test_the_share_of_repeated_text() -> None:
    assert repeated_share([sample(list(range(50)))]) == 0.0
    assert repeated_share([sample([1, 2, 3, 4] * 25)]) == pytest.approx(93 / 97)
    assert repeated_share([sample([1] * 4), sample([1, 2, 3, 4])]) == 0.0  # each by itself
    far = [*range(1024), *range(1024)]
    assert repeated_share([sample(far)]) == 0.0  # more than 1,024 tokens apart
    assert repeated_share([sample([1, 2])]) is None
    assert repeated_share([]) is None
    assert repeated_share([sample(list(range(9)))], least=7) is None
    same = sample([5] * 20)
    assert repeated_share([same] * 200) == repeated_share([same])
    other = [sample(list(range(20))) if i % 2 else same for i in range(128)]
    assert repeated_share(other) == repeated_share(other)
