"""The wheel of what git tracks, and fresh virtual environments that have it."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh_venvs import fresh_venv, linked_venv, pip_install, sh


@pytest.fixture(scope="session")
def tracked(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files: no stale build folder, nothing that git does not know."""
    if shutil.which("git") is None or not (repo_root / ".git").exists():
        pytest.skip("not a git checkout: what is tracked is not known")
    copy = tmp_path_factory.mktemp("tracked")
    for name in sh("git", "ls-files", "-z", cwd=repo_root).split("\0"):
        if name and (repo_root / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repo_root / name, target)
    return copy


@pytest.fixture(scope="session")
def wheel(tracked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files."""

    def build(out: Path) -> None:
        sh(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tracked)

    (built,) = made_once(tmp_path_factory, "wheel", build).glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheelhouse(repo_root: Path) -> Path:
    """Wheels of what ours needs."""
    folder = repo_root / ".wheelhouse"
    if not (folder / ".complete").exists():
        pytest.skip("no wheelhouse: `make wheelhouse` fetches it")
    return folder


@pytest.fixture(scope="session")
def fresh(wheelhouse: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its dependencies, installed offline."""
    made = made_once(
        tmp_path_factory, "fresh", lambda folder: fresh_venv(folder / "venv", wheelhouse, wheel)
    )
    return made / "venv"


@pytest.fixture(scope="session")
def fresh_to_train(wheelhouse: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, what it says it needs to train, and tools."""
    folder = tmp_path_factory.mktemp("fresh-to-train") / "venv"
    linked_venv(folder, wheel, "train", "pip", "pytest", "setuptools")
    pip_install(folder, wheelhouse, wheel)
    return folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that one of this session's processes makes, and the others use."""
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
