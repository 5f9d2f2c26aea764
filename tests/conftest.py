"""Fixtures that tests of several folders share."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support import fork_server, report
from support.pace import scale_timeouts

# Compiled tests are kept, also where PYTHONDONTWRITEBYTECODE is set: compiling takes longer than
# most of them.
sys.dont_write_bytecode = False
# Threads of OpenMP wait for one another in busy loops: beside other busy processes that takes ten
# times as long. The models of tests are small: one thread will do, and where a run has several in a
# part, they sleep while they wait. Set before torch is imported; what tests start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What is made while tests are collected stays for good: looking through it for garbage is in vain.
gc.disable()

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


def pytest_configure(config: pytest.Config) -> None:
    """Write a line for each test, where CI wants it."""
    report.register(config)


@pytest.fixture(scope="session", autouse=True)
def _own_sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the boxes of a session in a ledger of its own: boxes of others take no room in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLART_BOXES_DIR", str(tmp_path_factory.mktemp("ledger")))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Draw the same numbers whichever tests ran in this process before."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Draw the same numbers whichever fixtures were made before."""
    _seed()


def _seed() -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not in what is there already."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply each test's timeout by the scale of this machine."""
    scale_timeouts(items, float(config.getini("timeout")))


def pytest_sessionstart() -> None:
    """Fork the processes of runs from one that has imported what they need."""
    fork_server.install()


def pytest_unconfigure() -> None:
    """End the server that they are forked from."""
    fork_server.uninstall()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Start the processes of some tests as outside of tests."""
    if item.get_closest_marker("starts_normally") is None:
        return (yield)
    with fork_server.normally():
        return (yield)
