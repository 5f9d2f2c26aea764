"""Adaptive clipping against the papers' formulas, computed another way."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from pydantic import ValidationError

from rollart_core.config.run import Trainer
from rollart_core.training.optimizer import Clipping, make_clipping


def clipping(grad_clip: float = 1e9, **clip: object) -> Clipping:
    return make_clipping(Trainer.model_validate({"grad_clip": grad_clip, "clip": clip}))


def norms(num: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.lognormvariate(0, 1) for _ in range(num)]


def test_the_fixed_bound_is_all_there_is_by_default() -> None:
    ours = make_clipping(Trainer(grad_clip=2.0))
    for norm in (1.0, 2.0, 5e9):
        decision = ours.decide(norm)
        assert (decision.max_norm, decision.threshold, decision.skipped) == (2.0, 2.0, False)
        assert decision.clipped == (norm > 2)
    assert ours.state() == []


def test_autoclip_is_a_percentile_of_the_history_with_the_present_norm() -> None:
    ours, seen = clipping(kind="quantile", quantile=0.1, window=1000, warmup_updates=3), []
    for n, norm in enumerate(norms(60)):
        decision = ours.decide(norm)
        seen.append(norm)
        want = float(np.percentile(seen, 10)) if n >= 3 else 1e9
        assert decision.max_norm == decision.threshold == pytest.approx(want)
        assert decision.clipped == (norm > want)


def test_only_the_window_counts_and_grad_clip_stays_above() -> None:
    ours = clipping(grad_clip=2.0, kind="quantile", quantile=1.0, window=3, warmup_updates=3)
    bounds = [ours.decide(norm).max_norm for norm in (9.0, 0.1, 0.1, 0.5, 1.5, 0.5, 0.5, 0.5, 7.0)]
    assert bounds == [2.0, 2.0, 2.0, 0.5, 1.5, 1.5, 1.5, 0.5, 2.0]


def test_zclip_is_the_papers_algorithm() -> None:
    z_max, decay, warmup = 1.5, 0.9, 5
    given = [*norms(40), 50.0, *norms(5, seed=1)]
    ours = clipping(kind="zscore", z_threshold=z_max, ema_decay=decay, warmup_updates=warmup)
    got = [ours.decide(norm) for norm in given]
    assert [d.max_norm for d in got[:warmup]] == [1e9] * warmup
    mean, variance = float(np.mean(given[:warmup])), float(np.var(given[:warmup]))
    num_clipped = 0
    for norm, decision in zip(given[warmup:], got[warmup:], strict=True):
        sigma = math.sqrt(variance)
        assert decision.threshold == pytest.approx(mean + z_max * sigma)
        kept = norm
        if (z := (norm - mean) / (sigma + 1e-6)) > z_max:
            kept = mean + z_max * sigma / (z / z_max)
            num_clipped += 1
        assert decision.clipped == (kept < norm)
        assert min(norm, decision.max_norm) == pytest.approx(kept)
        mean = decay * mean + (1 - decay) * kept
        variance = decay * variance + (1 - decay) * (kept - mean) ** 2
    assert 2 <= num_clipped < 20


@pytest.mark.parametrize(
    "clip",
    [
        {"kind": "quantile", "window": 32, "warmup_updates": 5, "skip_above": 3.0},
        {"kind": "zscore", "warmup_updates": 5, "skip_above": 3.0},
    ],
)
def test_an_outlier_is_skipped_and_a_lasting_change_is_not(clip: dict[str, object]) -> None:
    ours = clipping(**clip)
    rng = random.Random(3)
    for _ in range(30):
        assert not ours.decide(rng.uniform(0.9, 1.1)).skipped
    assert ours.decide(20.0).skipped
    assert not ours.decide(1.0).skipped
    skipped = [ours.decide(20.0).skipped for _ in range(200)]
    assert skipped[0]
    assert sum(skipped[100:]) < 25  # ZClip takes norms far outside back to its mean for long


@pytest.mark.parametrize("num_before", [0, 2, 7, 50])
@pytest.mark.parametrize("kind", ["quantile", "zscore"])
def test_a_history_that_was_kept_gives_the_same_decisions(kind: str, num_before: int) -> None:
    clip: dict[str, object] = {"kind": kind, "warmup_updates": 5, "skip_above": 4.0}
    if kind == "quantile":
        clip["window"] = 8
    first, second = clipping(**clip), clipping(**clip)
    size = len(first.state())
    for norm in norms(num_before):
        first.decide(norm)
    assert len(first.state()) == size
    second.load_state(first.state())
    rest = norms(20, seed=9)
    assert [first.decide(n) for n in rest] == [second.decide(n) for n in rest]


def test_a_word_is_a_kind_and_a_wrong_one_is_named() -> None:
    assert Trainer.model_validate({"clip": "zscore"}).clip.kind == "zscore"
    with pytest.raises(ValidationError, match="there is no kind 'median': use one of norm"):
        Trainer.model_validate({"clip": "median"})
    with pytest.raises(ValidationError, match=r"warmup_updates \(20\) must be at most window"):
        Trainer.model_validate({"clip": {"kind": "quantile", "window": 4}})
