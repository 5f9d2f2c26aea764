"""Check whether the number in the answer is the right one.

Takes: one episode's request. Gives: 1 or 0. Never: treats a right answer that is not a number as a
wrong answer of the policy.

The last number of the answer is used: `1,234.5`, `-3/4`, `1.2e3`. Currency, percent signs and units
are ignored: `50%` equals 50, not 0.5. A dash before a blank is not a sign: `- 42` is 42.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Context, Decimal, DecimalException

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.answer import answer_part, references
from rollart_rewards.config_answers import NumericConfig
from rollart_rewards.examples import example

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.])([-+]?)(?:\s?[$€£¥]\s?)?({_DIGITS})([eE][-+]?\d+)?(?:\s?/\s?({_DIGITS}))?"
)
_MINUS = str.maketrans({"−": "-", "–": "-", "\u2009": "", "\u202f": ""})
_ARITHMETIC = Context(prec=60, traps=[])
"""No trap is set: a result out of bounds becomes infinite or NaN, and equals nothing."""


class Numeric(Reward):
    """Compare numbers; see the module.

    Args:
        options: The fields of :class:`NumericConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = NumericConfig.model_validate(options)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If the environment provides no right answer, or one that is not a number.
        """
        wanted = [self._wanted(text) for text in references(request, self.config.reference)]
        said = last_number(answer_part(request.answer, self.config.answer) or "")
        right = said is not None and any(self._is_near(said, one) for one in wanted)
        return RewardResult(float(right), {"found": float(said is not None)})

    def _wanted(self, text: str) -> Decimal:
        found = last_number(text)
        if found is None:
            raise ValueError(f"the right answer {text!r:.80} is not a number")
        return found

    def _is_near(self, said: Decimal, wanted: Decimal) -> bool:
        """Return whether ``|said - wanted| <= max(rel_tol * |wanted|, abs_tol)``."""
        if said == wanted:
            return True
        apart = abs(_ARITHMETIC.subtract(said, wanted))
        share = _ARITHMETIC.multiply(Decimal(self.config.rel_tol), abs(wanted))
        limit = max(share, Decimal(self.config.abs_tol))
        return bool(apart.is_finite() and limit.is_finite() and apart <= limit)

    def examples(self) -> Sequence[RewardExample]:
        """Return examples with known values if the whole message is the answer."""
        if self.config.answer != "message":
            return (example("nothing of the kind", 1, 0.0),)
        return (
            example("First 3, so the answer is $1,234.50.", 1234.5, 1.0),
            example("-3/4", "-0.75", 1.0),
            example("a hundred", 100, 0.0),
            example("1e9999", 100, 0.0),
        )


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text; None if there is none, or it is not finite."""
    found = list(_NUMBER.finditer(text.translate(_MINUS)))
    if not found:
        return None
    sign, digits, exponent, divisor = found[-1].groups()
    try:
        number = _ARITHMETIC.create_decimal(f"{sign}{digits.replace(',', '')}{exponent or ''}")
        if divisor:
            number = _ARITHMETIC.divide(number, Decimal(divisor.replace(",", "")))
    except DecimalException:
        return None
    return number if number.is_finite() else None
