"""pass@k and means clustered by task."""

import itertools
import random

import pytest

from rollart_core.store.estimates import clustered_mean, clustered_share, wilson
from rollart_evals.cells import ks_of, pass_at_k, pass_estimates


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 4, 2), (4, 0, 4)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_one(n, c, k):
    attempts = [True] * c + [False] * (n - c)
    choices = list(itertools.combinations(attempts, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)


def test_pass_at_k_keeps_its_precision_with_many_attempts():
    assert pass_at_k(2000, 1, 1) == pytest.approx(1 / 2000, rel=1e-12)
    assert pass_at_k(2000, 1000, 2000) == 1


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0)])
def test_pass_at_more_than_was_tried_is_refused(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_ks_follow_from_the_attempts():
    assert [ks_of(n) for n in (1, 2, 3, 4, 6)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 6)]


@pytest.mark.parametrize("wins", [0, 1, 7, 40])
def test_with_one_attempt_a_task_the_interval_is_wilsons(wins):
    by_task = {i: [float(i < wins)] for i in range(40)}
    found, expected = clustered_share(by_task), wilson(wins, 40)
    assert (found.n, found.mean) == (40, pytest.approx(expected.mean))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_attempts_that_only_repeat_the_task_say_nothing_more():
    once = clustered_share({i: [float(i < 10)] for i in range(40)})
    repeated = clustered_share({i: [float(i < 10)] * 8 for i in range(40)})
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high))
    assert repeated.n == 320
    independent = clustered_share({i: [1.0, 0.0, 0.0, 0.0] for i in range(40)})
    assert independent.high - independent.low > wilson(40, 160).high - wilson(40, 160).low - 1e-9


def test_tasks_of_unequal_attempts_count_alike():
    estimate = clustered_share({"a": [1.0] * 9, "b": [0.0]})
    assert (estimate.mean, estimate.n) == (0.5, 10)
    assert clustered_mean({"a": [2.0] * 9, "b": [0.0], "none": []}).mean == 1.0


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng, held = random.Random(0), 0
    for _ in range(200):
        chances = [0.1 if rng.random() < 0.5 else 0.9 for _ in range(40)]
        by_task = {i: [float(rng.random() < p) for _ in range(4)] for i, p in enumerate(chances)}
        estimate = clustered_share(by_task)
        held += estimate.low <= 0.5 <= estimate.high
    assert 180 <= held <= 199  # an interval that took the 160 attempts as independent: about 150


def test_a_task_with_fewer_attempts_is_part_of_what_they_suffice_for():
    passes = pass_estimates({"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0, 0.0]}, 4)
    assert [(k, e.n) for k, e in passes.items()] == [(1, 2), (2, 2), (4, 1)]
    assert passes[1].mean == pytest.approx(0.125)
    assert passes[2].mean == pytest.approx(0.25)
    assert passes[4].mean == 1


def test_nothing_is_not_nought():
    assert clustered_share({}).n == 0
    assert pass_estimates({"a": [1.0]}, 2)[2].n == 0
