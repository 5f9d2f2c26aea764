"""From nothing to a checked and trained environment, as a stranger walks it: from the wheel."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh_venvs import clean_environ, offline, sh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Shell = Callable[[str], str]

ROAD = (
    "rollart new-env acme-maze --non-interactive",
    "pip install -e acme-maze",
    "rollart check acme/Maze-v1",
    "rollart run acme-maze/example.yaml",
)
SCAFFOLDS = {
    "new-env": ("acme-grid-maze", "acme/GridMaze-v1"),
    "new-env --kind agent": ("acme-guess", "acme/Guess-v1"),
    "new-reward": ("acme-brevity", "acme/Brevity-v1"),
    "new-algorithm": ("acme-loo", "acme/Loo-v1"),
    "new-mapper": ("acme-split", "acme/Split-v1"),
}


@pytest.fixture(scope="module")
def shell(
    fresh_to_train: Path, training_wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Shell:
    """Runs a command line in an empty folder, with the virtual environment on the path."""
    folder = tmp_path_factory.mktemp("road")
    path = f"{fresh_to_train / 'bin'}:{clean_environ()['PATH']}"
    extra = {**offline(training_wheelhouse), "PATH": path}
    return lambda line: sh("bash", "-euc", line, cwd=folder, extra=extra)


def test_the_one_minute_road(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    times = {}
    for command in ROAD:
        began = time.perf_counter()
        shell(command)
        times[command] = time.perf_counter() - began
    lines = [f"{seconds:6.1f} s  {command}" for command, seconds in times.items()]
    with capsys.disabled():
        print("", *lines, f"{sum(times.values()):6.1f} s  together", sep="\n")
    report = json.loads(shell("cat runs/acme-maze-*/report.json"))
    assert report["train_steps"] > 0
    assert report["success_after"]["n"] > 0
    assert "id: acme/Maze-v1" in shell("cat runs/acme-maze-*/config.yaml")
    assert sum(times.values()) < 600


@pytest.mark.parametrize("command", SCAFFOLDS)
def test_a_scaffold_installs_is_listed_and_passes_its_own_tests(command: str, shell: Shell) -> None:
    name, plugin_id = SCAFFOLDS[command]
    made = json.loads(shell(f"rollart {command} {name} --json"))
    shell(f"pip install -q -e {name}")
    listed = json.loads(shell("rollart list --json"))
    assert listed["broken"] == []
    assert plugin_id in {e["id"] for kind in made["ids"] for e in listed[kind]}
    assert " passed" in shell(f"cd {name} && pytest -q")


@pytest.mark.parametrize("command", SCAFFOLDS)
def test_a_scaffold_is_clean_for_ruff_and_mypy(
    command: str, shell: Shell, fresh_to_train: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # the longest name there may be: would a line overflow?
    name = f"acme-{command.replace(' --kind ', '-')}-".ljust(32, "w")
    shell(f"rollart {command} {name} --non-interactive")
    cache = tmp_path_factory.getbasetemp() / "mypy"  # of what all of them import
    mypy = f"mypy --python-executable {fresh_to_train}/bin/python --cache-dir {cache}"
    for tool in ("ruff check .", "ruff format --check .", mypy):
        shell(f"cd {name} && {sys.executable} -m {tool}")


def test_a_name_that_is_installed_is_refused_and_nothing_is_made(shell: Shell) -> None:
    shell("rollart new-env acme-twice --non-interactive && pip install -q -e acme-twice")
    refused = shell("rollart new-env acme_twice --output .. 2>&1 && exit 1 || true")
    assert "distribution 'acme-twice' is installed already" in refused
    assert shell("ls -a .. | grep twice || true") == ""


def test_a_wheel_of_the_scaffold_has_its_manifest(shell: Shell) -> None:
    shell("rollart new-env acme-shipped --non-interactive")
    shell("pip wheel -q --no-deps -w dist ./acme-shipped")
    code = (
        "from pathlib import Path; from rollart_core.manifest import read_wheel_manifests as r;"
        "print(*r(next(Path('dist').glob('*.whl'))))"
    )
    assert shell(f'python -c "{code}"').strip() == "acme_shipped"
