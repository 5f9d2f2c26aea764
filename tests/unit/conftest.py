"""What holds of the unit suite as a whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

HEAVY = frozenset({"torch", "transformers", "hypothesis", "ray"})


@pytest.fixture(scope="session", autouse=True)
def _light() -> Iterator[None]:
    """Fail when unit tests by themselves import what takes seconds: such tests are integration."""
    before = HEAVY & set(sys.modules)
    yield
    assert HEAVY & set(sys.modules) == before
