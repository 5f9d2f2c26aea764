"""The wheel of what git tracks, and fresh virtual environments that have it."""

from __future__ import annotations

import shutil
import sys
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
    out = tmp_path_factory.mktemp("wheel")
    sh(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tracked)
    (built,) = out.glob("*.whl")
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
    return fresh_venv(tmp_path_factory.mktemp("fresh") / "venv", wheelhouse, wheel)


@pytest.fixture(scope="session")
def fresh_to_train(wheelhouse: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, what it says it needs to train, and tools."""
    folder = tmp_path_factory.mktemp("fresh-to-train") / "venv"
    linked_venv(folder, wheel, "train", "pip", "pytest", "setuptools")
    pip_install(folder, wheelhouse, wheel)
    return folder
