"""Fixtures that tests of several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Data and recorded traces that are too large for the repository; skips where they are not."""
    folder = Path(os.environ.get("ROLLART_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set ROLLART_SHARED to where they are")
    return folder
