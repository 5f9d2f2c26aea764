"""A user's Python, index and plans, for tests that install from a registry."""

from __future__ import annotations

import importlib
import venv
from pathlib import Path

import pytest

from rollart_registry.client import opened
from rollart_registry.install import trusted_by
from rollart_registry.interpreter import TargetInterpreter
from rollart_registry.lock import Lock
from rollart_registry.names import parse_wanted
from rollart_registry.plan import Plan, make_plan
from rollart_registry.verify import verify_lock
from support.registry_wheels import Scene


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own index: a folder, with nothing else to be reached."""
    monkeypatch.setenv("ROLLART_CONFIG_DIR", str(tmp_path / "config"))
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
    return folder


def fresh(folder: Path, *, pip: bool = True) -> TargetInterpreter:
    """Return a Python that has nothing; pip is a link to ours, as installing it takes seconds."""
    venv.create(folder, with_pip=False, symlinks=True)
    if pip:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "pip").symlink_to(Path(importlib.import_module("pip").__file__ or "").parent)
    return TargetInterpreter.at(folder / "bin/python")


def planned(scene: Scene, interpreter: TargetInterpreter, **options: bool) -> Plan:
    with opened(scene.trusted()) as client:
        return make_plan(client, parse_wanted("acme/Maze-v1"), interpreter, **options)


def differences(lock: Lock, interpreter: TargetInterpreter) -> list[str]:
    with opened(trusted_by(lock)) as client:
        return verify_lock(client, lock, interpreter.again())
