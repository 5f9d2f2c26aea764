"""What a reward answered, held to its contract where it enters: finite, in range, complete.

Takes: whatever came back. Gives: what is wrong with it in a few words, or an empty text. Never:
mends an answer.

A reward may also say what it should answer: ``examples() -> Sequence[RewardExample]`` (optional),
which `rollart check` asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.errors import first_line

SLACK: Final = 1e-6
"""How far a value may be outside its range: rounding."""


@dataclass(frozen=True, slots=True)
class RewardExample:
    """Requests that a reward can score, and what it must answer."""

    requests: tuple[RewardRequest, ...]
    """One; for a group reward a whole group."""
    values: tuple[float, ...] | None = None
    """The value of each; None: whatever is in range."""


def result_problem(result: object, reward_range: tuple[float, float]) -> str:
    """Return what is wrong with one result; empty when nothing is."""
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
    """Return what is wrong with the results of a group; empty when nothing is."""
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        return f"a {type(results).__name__}, not a list of results"
    if len(results) != num_requests:
        return f"{len(results)} results for {num_requests} requests"
    return next((p for one in results if (p := result_problem(one, reward_range))), "")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; numpy's are numbers too, True is none."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):  # a huge int has no float
        return False
