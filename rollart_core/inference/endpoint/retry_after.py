"""When to ask a server again: what it says (``Retry-After``), or longer and longer.

Takes: headers of an answer, or the attempts so far. Gives: seconds. Never: sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenacity.wait import wait_base

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


def backoff() -> wait_base:
    """Return how long to wait after an attempt that failed without advice.

    A random half keeps many that failed together from coming back together.
    """
    from tenacity import wait_exponential, wait_random_exponential

    half = {"multiplier": FIRST_WAIT_S / 2, "max": LONGEST_WAIT_S / 2}
    return wait_exponential(**half) + wait_random_exponential(**half)


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
