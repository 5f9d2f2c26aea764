"""Waiting for events on machines of any speed.

A test waits for a condition, never for a number of seconds. The limits here only end a wait that
would never end; ``ROLLART_TEST_TIMEOUT_SCALE`` multiplies all of them, and each test's timeout.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")

VARIABLE: Final = "ROLLART_TEST_TIMEOUT_SCALE"
LIMIT_S: Final = 60.0
"""How long a wait may take, before scaling."""
_PAUSE_S: Final = 0.01


def timeout_scale() -> float:
    """Return by how much timeouts are multiplied on this machine.

    Raises:
        ValueError: If the variable is no number above 0.
    """
    given = os.environ.get(VARIABLE) or "1"
    try:
        scale = float(given)
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise ValueError(f"{VARIABLE}={given!r}: must be a number above 0")
    return scale


def scaled(seconds: float) -> float:
    """Return a limit in seconds, multiplied by the scale."""
    return seconds * timeout_scale()


def scale_timeouts(items: Sequence[pytest.Item], default_s: float) -> None:
    """Multiply the timeout of each test, its mark's or the default, by the scale."""
    if timeout_scale() == 1.0:
        return
    import pytest  # not in the programs that tests start

    for item in items:
        mark = item.get_closest_marker("timeout")
        limit_s = float(mark.args[0]) if mark else default_s
        item.add_marker(pytest.mark.timeout(scaled(limit_s)), append=False)


def wait_until(condition: Callable[[], T], what: str, *, limit_s: float = LIMIT_S) -> T:
    """Wait until a condition holds and return its value.

    Args:
        condition: Asked again and again; what it raises ends the wait.
        what: What is waited for, for the error.
        limit_s: After how many seconds to give up, before scaling.

    Raises:
        TimeoutError: If it does not hold in time.
    """
    end = time.monotonic() + scaled(limit_s)
    while True:
        if found := condition():
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {scaled(limit_s):g} s")
        time.sleep(_PAUSE_S)


async def until(condition: Callable[[], T], what: str, *, limit_s: float = LIMIT_S) -> T:
    """Wait as :func:`wait_until` does, and let the event loop run meanwhile."""
    end = time.monotonic() + scaled(limit_s)
    while True:
        if found := condition():
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {scaled(limit_s):g} s")
        await asyncio.sleep(_PAUSE_S)
