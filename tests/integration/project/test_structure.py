"""What the layout of the source promises, by ``scripts/structure.py``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = {
    "functions over 60 lines": 0,
    "code lines of the core": 24_000,
    "modules with one importer": 60,
    "import cycles": 0,
    "loose files in rollart_core": 6,
}
MOST_IN_A_RUN = {"files of an episode": 15, "frames of env.step": 8, "frames of reward.score": 12}


def measured(repo_root: Path, *options: str) -> dict[str, int]:
    script = str(repo_root / "scripts/structure.py")
    ended = subprocess.run(
        [sys.executable, script, "--json", *options],
        check=False,
        capture_output=True,
        text=True,
        cwd=repo_root,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    return {name: len(v) if isinstance(v, list) else v for name, v in found.items()}


def above(found: dict[str, int], most: dict[str, int]) -> dict[str, int]:
    return {name: found[name] for name in most if found[name] > most[name]}


def test_the_core_is_small_and_modules_are_deep(repo_root: Path) -> None:
    assert above(measured(repo_root), MOST) == {}


@pytest.mark.slow
def test_an_episode_crosses_few_files_and_frames(repo_root: Path) -> None:
    found = measured(repo_root, "--run")
    assert above(found, MOST_IN_A_RUN) == {}
    assert min(found[name] for name in MOST_IN_A_RUN) >= 4, "nothing was measured"
