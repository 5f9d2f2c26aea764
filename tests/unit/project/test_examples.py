"""What the first line of an example says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ELSEWHERE = {"bandit", "suite", "webshop", "webshop_official"}
"""Their figures, or what they are for, are in docs/."""
LEARNS = {"function_repair", "lora", "rewards", "rlvr"}
SMOKE = {
    *("hello", "mission", "mix", "multi_domain", "ray", "sglang", "sokoban", "stock", "vllm"),
}


def first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0]


def test_every_example_says_whether_it_learns(repo_root: Path) -> None:
    found = {path.stem for path in (repo_root / "examples").glob("*.yaml")} - ELSEWHERE
    assert found == LEARNS | SMOKE


@pytest.mark.parametrize("name", sorted(LEARNS))
def test_an_example_that_learns_says_in_how_many_updates(name: str, repo_root: Path) -> None:
    path = repo_root / f"examples/{name}.yaml"
    said = re.match(r"# Shows learning in (\d+) updates: ", first_line(path))
    assert said, first_line(path)
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config["stop"]["batches"] == int(said[1])
    assert "wall_s" not in config["stop"]  # never by the clock


@pytest.mark.parametrize("name", sorted(SMOKE))
def test_a_smoke_test_says_that_it_is_one_and_ends_after_some_updates(
    name: str, repo_root: Path
) -> None:
    path = repo_root / f"examples/{name}.yaml"
    assert first_line(path).startswith("# Smoke test: "), first_line(path)
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["stop"]["batches"] <= 100
