"""From nothing to a checked and trained environment, as a stranger walks it: from the wheel."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh_venvs import clean_environ, offline, sh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Shell = Callable[[str], str]
Listed = dict[str, list[dict[str, str]]]

ROAD = (
    "rollart new-env acme-maze --non-interactive",
    "pip install -e acme-maze",
    "rollart check acme/Maze-v1",
    # by default it trains until a number of seconds is over
    "rollart run acme-maze/example.yaml stop.wall_s=null stop.batches=2",
)
SCAFFOLDS = {
    "new-env": ("acme-grid-maze", "acme/GridMaze-v1"),
    "new-env --kind tool": ("acme-teams", "acme/Teams-v1"),
    "new-env --kind agent": ("acme-guess", "acme/Guess-v1"),
    "new-reward": ("acme-brevity", "acme/Brevity-v1"),
    "new-algorithm": ("acme-loo", "acme/Loo-v1"),
    "new-mapper": ("acme-split", "acme/Split-v1"),
}


@pytest.fixture(scope="module")
def shell(
    fresh_to_train: Path, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Shell:
    """Runs a command line in an empty folder, with the virtual environment on the path."""
    folder = tmp_path_factory.mktemp("road")
    path = f"{fresh_to_train / 'bin'}:{clean_environ()['PATH']}"
    extra = {**offline(wheelhouse), "PATH": path}
    return lambda line: sh("bash", "-euc", line, cwd=folder, extra=extra)


def test_the_one_minute_road(shell: Shell) -> None:
    for command in ROAD:
        shell(command)
    report = json.loads(shell("cat runs/acme-maze-*/report.json"))
    assert report["batches"] == 2
    assert report["success_after"]["n"] > 0
    assert "id: acme/Maze-v1" in shell("cat runs/acme-maze-*/config.yaml")


@pytest.fixture(scope="module")
def listed(shell: Shell) -> Listed:
    """What is listed once every scaffold is made and installed."""
    for command, (name, plugin_id) in SCAFFOLDS.items():
        made = json.loads(shell(f"rollart {command} {name} --json"))
        assert plugin_id in made["ids"].values()
    editable = " ".join(f"-e ./{name}" for name, _ in SCAFFOLDS.values())
    shell(f"pip install -q --no-build-isolation {editable}")
    found: Listed = json.loads(shell("rollart list --json"))
    return found


@pytest.mark.parametrize("command", SCAFFOLDS)
def test_a_scaffold_installs_is_listed_and_passes_its_own_tests(
    command: str, shell: Shell, listed: Listed
) -> None:
    name, plugin_id = SCAFFOLDS[command]
    assert listed.get("broken") == []
    (entry,) = [e for each in listed.values() for e in each if e.get("id") == plugin_id]
    assert entry["distribution"] == name
    assert " passed" in shell(f"cd {name} && pytest -q")


@pytest.mark.parametrize("command", SCAFFOLDS)
def test_a_scaffold_is_clean_for_ruff_and_mypy(
    command: str,
    shell: Shell,
    fresh: Path,
    fresh_to_train: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # the longest name there may be: would a line overflow?
    name = f"acme-{command.replace(' --kind ', '-')}-".ljust(32, "w")
    shell(f"rollart {command} {name} --non-interactive")
    # mypy's cache serves all but the mapper, which has other options and needs no torch
    site = fresh if command == "new-mapper" else fresh_to_train
    cache = tmp_path_factory.getbasetemp() / "mypy" / site.parent.name
    mypy = f"mypy --python-executable {site}/bin/python --cache-dir {cache}"
    for tool in ("ruff check .", "ruff format --check .", mypy):
        shell(f"cd {name} && {sys.executable} -m {tool}")


def test_a_name_that_is_installed_is_refused_and_nothing_is_made(
    shell: Shell, listed: Listed
) -> None:
    refused = shell("rollart new-reward acme_brevity --output .. 2>&1 && exit 1 || true")
    assert "distribution 'acme-brevity' is already installed" in refused
    assert shell("ls -a .. | grep brevity || true") == ""


def test_a_wheel_of_the_scaffold_has_its_manifest(shell: Shell) -> None:
    shell("rollart new-env acme-shipped --non-interactive")
    shell("pip wheel -q --no-deps --no-build-isolation -w dist ./acme-shipped")
    code = (
        "from pathlib import Path;"
        "from rollart_core.plugins.manifest import read_wheel_manifests as r;"
        "print(*r(next(Path('dist').glob('*.whl'))))"
    )
    assert shell(f'python -c "{code}"').strip() == "acme_shipped"
