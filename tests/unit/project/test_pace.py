"""The waits of tests: they end with an event, and their limits are scaled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.pace import VARIABLE, scale_timeouts, scaled, timeout_scale, until, wait_until

pytest_plugins = ["pytester"]


def test_waiting_returns_the_first_true_value() -> None:
    values: Iterator[int] = iter([0, 0, 7])
    assert wait_until(lambda: next(values), "a value") == 7
    more: Iterator[int] = iter([0, 3])
    assert asyncio.run(until(lambda: next(more), "a value")) == 3


def test_what_never_happens_is_named() -> None:
    with pytest.raises(TimeoutError, match="rain: not within"):
        wait_until(lambda: False, "rain", limit_s=0)
    with pytest.raises(TimeoutError, match="rain: not within"):
        asyncio.run(until(lambda: False, "rain", limit_s=0))


@pytest.mark.parametrize("given", ["fast", "0", "-1", "inf", "nan"])
def test_a_scale_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{given}'"):
        timeout_scale()


def test_limits_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2.5")
    assert scaled(4) == 10


def test_timeouts_of_tests_are_scaled(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    items = pytester.getitems(
        """
        import pytest

        def test_by_default():
            pass

        @pytest.mark.timeout(7)
        def test_by_its_mark():
            pass
        """
    )

    def limits() -> list[object]:
        marks = [item.get_closest_marker("timeout") for item in items]
        return [mark and mark.args[0] for mark in marks]

    scale_timeouts(items, 100)
    assert limits() == [None, 7]
    monkeypatch.setenv(VARIABLE, "3")
    scale_timeouts(items, 100)
    assert limits() == [300, 21]
