"""When to ask a server again: what it says (``Retry-After``), or longer and longer.

Takes: headers of an answer, how often it was asked already. Gives: seconds. Never: sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 16.0


def requested_wait_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """Return how long a server asks to be left alone, or None when it does not say.

    ``Retry-After`` is seconds or a date (RFC 9110, 10.2.3); ``retry-after-ms`` is what some send
    beside it, and is finer.

    Args:
        headers: Of the answer; looked up as they are spelled by the RFC or in lower case.
        now_s: Seconds since the epoch.
    """
    given = headers.get("retry-after-ms")
    milliseconds = _number(given)
    if milliseconds is not None:
        return milliseconds / 1000
    given = headers.get("Retry-After") or headers.get("retry-after")
    seconds = _number(given)
    if seconds is not None or given is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(given).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None


def backoff_s(attempt: int, spread: float) -> float:
    """Return how long to wait after a failed attempt that came with no advice.

    Args:
        attempt: 0 after the first.
        spread: 0 to 1: many that failed together do not come back together.
    """
    longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt, 30))
    return longest * (0.5 + 0.5 * spread)


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
