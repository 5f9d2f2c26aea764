"""Trainer and engine are compared before the first update; a difference names what to inspect."""

from collections.abc import Callable

import numpy as np
import pytest

from rollart_core.errors import LogprobMismatch
from rollart_core.training.cross_check import CAUSES, check_agreement, differences
from rollart_core.types import Sample

Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The difference of each token, by its position and its turn."""


def make_samples(num: int = 8, num_turns: int = 2, tokens: int = 50) -> list[Sample]:
    """Rows in which prompt and answer of a turn have ``tokens`` tokens each."""
    rng = np.random.default_rng(0)
    mask = np.tile(np.repeat([False, True], tokens), num_turns)
    turns = np.where(mask, np.repeat(np.arange(num_turns), 2 * tokens), -1).astype(np.int32)
    ids, versions = np.zeros(len(mask), np.int32), np.where(mask, 0, -1).astype(np.int32)
    return [
        Sample(
            ids, mask, np.where(mask, -rng.random(len(mask)), 0).astype(np.float32), versions, turns
        )
        for _ in range(num)
    ]


def figures_of(distance: Distance, num_turns: int = 2) -> dict[str, float]:
    samples = make_samples(num_turns=num_turns)
    places = np.arange(samples[0].num_tokens)
    rows = [s.inference_logprobs + distance(places, s.turn_ids).astype(np.float32) for s in samples]
    return differences(samples, rows)


def test_equal_logprobs_pass():
    figures = figures_of(lambda places, turns: 0.0 * places)
    assert figures["mean"] == figures["max"] == figures["kl"] == 0.0
    assert (figures["answers"], figures["tokens"]) == (8, 800)
    check_agreement(figures, 1e-9)


def test_the_figures_are_those_of_sampled_tokens():
    figures = figures_of(lambda places, turns: np.where(turns < 0, 9.0, np.where(turns, -0.4, 0.2)))
    assert figures["mean"] == pytest.approx(0.3, rel=1e-5)
    assert figures["max"] == pytest.approx(0.4, rel=1e-5)
    assert figures["first_turn"] == pytest.approx(0.2, rel=1e-5)
    assert figures["later_turns"] == pytest.approx(0.4, rel=1e-5)
    k3 = [np.expm1(d) - d for d in (0.2, -0.4)]
    assert figures["kl"] == pytest.approx(np.mean(k3), rel=1e-4)
    check_agreement(figures, 0.31)
    with pytest.raises(LogprobMismatch, match=r"8 answers .* 0\.3 nats .* is 0\.29; all tokens"):
        check_agreement(figures, 0.29)


@pytest.mark.parametrize(
    ("cause", "num_turns", "distance"),
    [
        ("turns", 2, lambda places, turns: np.where(turns > 0, 0.5, 0.01)),
        ("tokens", 1, lambda places, turns: np.where(places % 50 == 49, 9.0, 0.01)),
        ("length", 1, lambda places, turns: np.where(places > 80, 0.02 * (places - 80), 0.01)),
        ("all", 1, lambda places, turns: 0.3 + 0.0 * places),
        ("all", 3, lambda places, turns: 0.3 + 0.0 * places),
    ],
)
def test_the_pattern_names_what_to_inspect(cause: str, num_turns: int, distance: Distance):
    with pytest.raises(LogprobMismatch) as caught:
        check_agreement(figures_of(distance, num_turns), 0.05)
    assert CAUSES[cause] in str(caught.value)


def test_a_conversation_that_starts_later_has_a_first_turn_of_its_own():
    (sample,) = make_samples(1, num_turns=1)
    later = Sample(
        sample.token_ids,
        sample.loss_mask,
        sample.inference_logprobs,
        sample.policy_versions,
        np.where(sample.loss_mask, 5, -1).astype(np.int32),
    )
    assert differences([later], [later.inference_logprobs + 1])["first_turn"] == 1.0
