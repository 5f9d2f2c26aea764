"""Validation of reward results: finite, in range, complete.

Takes: the result of a reward, of any type. Gives: the problem as a short text, or an empty text.
Never: fixes a result.

A reward may declare expected results in the optional method ``examples() ->
Sequence[RewardExample]``. `rollart check` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.errors import first_line

SLACK: Final = 1e-6
"""Tolerance of the range for rounding errors."""


@dataclass(frozen=True, slots=True)
class RewardExample:
    """Example requests and their expected values."""

    requests: tuple[RewardRequest, ...]
    """One request. For a group reward, a whole group."""
    values: tuple[float, ...] | None = None
    """The expected value of each request. None accepts every value in range."""


def result_problem(result: object, reward_range: tuple[float, float]) -> str:
    """Return the problem of one result. Empty if it is valid."""
    low, high = reward_range
    if not isinstance(result, RewardResult):
        return f"a {type(result).__name__}, not a RewardResult"
    if not is_number(result.value):
        return f"the value {first_line(repr(result.value), 80)}"
    if not low - SLACK <= result.value <= high + SLACK:
        return f"{result.value:g}, outside its range {low:g} to {high:g}"
    wrong = [name for name, value in result.components.items() if not is_number(value)]
    return f"no number as its component {wrong[0]!r}" if wrong else ""


def results_problem(results: object, num_requests: int, reward_range: tuple[float, float]) -> str:
    """Return the problem of the results of a group. Empty if they are valid."""
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        return f"a {type(results).__name__}, not a list of results"
    if len(results) != num_requests:
        return f"{len(results)} results for {num_requests} requests"
    return next((p for one in results if (p := result_problem(one, reward_range))), "")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number. Numpy numbers are accepted, booleans are not."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):  # a huge int does not fit in a float
        return False
