"""Which validation is the best, whether the last one fell, and when training ends by them."""

import math

import pytest

from rollart_core.config.evaluation import StopWhen
from rollart_core.errors import ConfigError
from rollart_core.scheduling.evaluate import EvaluationResult
from rollart_core.scheduling.validations import Validation, Validations, spelled
from rollart_core.store.estimates import Estimate, wilson

NOTHING = Estimate(math.nan, 0.0, 1.0, 0)


def result(wins: int, n: int = 20, success: Estimate | None = None) -> EvaluationResult:
    share = wilson(wins, n)
    return EvaluationResult(success or share, share, 0, 0, 1.0, 1.0)


def failed(n: int = 20) -> EvaluationResult:
    return EvaluationResult(NOTHING, Estimate(math.nan, math.nan, math.nan, 0), n, 0, 0.0, 0.0)


def validations(*wins: int | None, metric="validation/success", when=None) -> Validations:
    """Return validations of versions 0, 10, 20, ... with so many wins of 20; None: all failed."""
    found = Validations(metric, when)
    for i, one in enumerate(wins):
        found.add(10 * i, failed() if one is None else result(one))
    return found


def best_version(found: Validations) -> int | None:
    return found.best.policy_version if found.best else None


def test_the_best_is_the_latest_of_equal_ones() -> None:
    found = validations(3, 12, 12, 8)
    assert best_version(found) == 20
    assert [v.is_best for v in found.all] == [True, True, True, False]
    assert found.last is not None
    assert found.last.policy_version == 30


def test_a_validation_whose_episodes_all_failed_is_never_the_best() -> None:
    assert best_version(validations(None)) is None
    found = validations(None, 2, None)
    assert best_version(found) == 10
    assert found.last is not None
    assert "all 20 episodes failed" in spelled(found.last)
    assert found.fell() is None


def test_weights_that_are_gone_are_not_the_best() -> None:
    found = validations(3, 12, 8)
    found.leave_out(10)
    assert best_version(found) == 20


def test_a_fall_is_one_beyond_the_interval_of_the_last() -> None:
    assert validations(10, 19, 18).fell() is None
    assert validations(10, 19, 8).fell() == (
        "validation/success fell from 95.0% at policy version 10 to 40.0% [21.9%, 61.3%] "
        "at version 20"
    )


@pytest.mark.parametrize(
    ("wins", "stops"),
    [
        ((19, 10, 19), False),
        ((10, 19), False),
        ((19, None, 19), False),
        ((10, 19, 20), True),
        ((19, 19), True),
    ],
)
def test_a_value_must_be_reached_in_a_row(wins: tuple[int | None, ...], stops: bool) -> None:
    when = StopWhen(metric="validation/success", value=0.95, patience=2)
    reason = validations(*wins, when=when).stop_reason()
    assert (reason is not None) == stops


def test_the_reason_of_a_stop_has_the_numbers() -> None:
    when = StopWhen(metric="validation/success", value=0.95, patience=2)
    assert validations(10, 19, 20, when=when).stop_reason() == (
        "stop.when: validation/success was 95.0%, 100.0% at policy version 10, 20: at or above "
        "95.0% in 2 validations in a row"
    )
    patient = StopWhen(metric="validation/score", patience=2)
    assert validations(5, 12, 12, 9, when=patient).stop_reason() == (
        "stop.when: validation/score was 0.600, 0.450 at policy version 20, 30: not above the "
        "best, 0.600, in 2 validations in a row"
    )


@pytest.mark.parametrize(
    ("wins", "stops"),
    [((5, 5), False), ((5, 5, 5), True), ((5, 4, 6), False), ((5, 6, 4, None), True)],
)
def test_without_a_value_it_is_the_gain_that_counts(
    wins: tuple[int | None, ...], stops: bool
) -> None:
    when = StopWhen(metric="validation/success", patience=2)
    assert (validations(*wins, when=when).stop_reason() is not None) == stops


def test_going_back_forgets_later_versions_and_takes_up_what_was_recorded() -> None:
    when = StopWhen(metric="validation/success", value=0.5, patience=2)
    found = validations(10, 12, 14, when=when)
    recorded = [Validation.from_dict(v.as_dict()) for v in found.all]
    assert recorded == list(found.all)
    found.go_back(10)
    assert [v.policy_version for v in found.all] == [0, 10]
    fresh = Validations("validation/success", when)
    fresh.go_back(10, recorded[::-1])
    assert fresh.all == found.all
    assert fresh.stop_reason() == found.stop_reason() != None  # noqa: E711
    assert best_version(fresh) == 10


def test_what_json_does_not_have_is_null_and_comes_back() -> None:
    made = Validation(4, NOTHING, Estimate(0.5, -math.inf, math.inf, 1), 19)
    plain = made.as_dict()
    assert (plain["success"], plain["score_low"], plain["num_episodes"]) == (None, None, 1)
    again = Validation.from_dict(plain)
    assert math.isnan(again.success.mean)
    assert again.score == made.score


def test_success_that_nobody_says_is_refused_by_the_key_that_asks_for_it() -> None:
    mute = result(3, success=NOTHING)
    with pytest.raises(ConfigError, match=r"keep_best: validation/success: .*use validation/score"):
        Validations("validation/success", None).add(0, mute)
    when = StopWhen(metric="validation/success")
    with pytest.raises(ConfigError, match=r"^stop\.when\.metric: validation/success"):
        Validations("validation/score", when).add(0, mute)
    by_score = Validations(None, None)
    by_score.add(0, mute)
    assert by_score.metric == "validation/score"
