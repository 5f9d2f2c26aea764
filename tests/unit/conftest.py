"""What holds of the unit suite as a whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest

from rollart_core.plugins import manager as plugins

HERE = Path(__file__).parent
HEAVY = frozenset({"torch", "transformers", "hypothesis", "ray"})


@pytest.fixture(scope="session", autouse=True)
def _light(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail when unit tests by themselves import what takes seconds: such tests are integration."""
    alone = all(HERE in item.path.parents for item in request.session.items)
    before = HEAVY & set(sys.modules)
    yield
    assert not alone or HEAVY & set(sys.modules) == before


@pytest.fixture(scope="session", autouse=True)
def _installed() -> Iterator[None]:
    """Look for installed distributions once for each ``sys.path``, not at every load of plugins."""

    @cache
    def found(path: tuple[str, ...], group: str) -> EntryPoints:
        return entry_points(group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "entry_points", lambda group: found(tuple(sys.path), group))
        yield
