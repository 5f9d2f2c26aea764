"""The workflows of continuous integration: read as the service reads them, nothing is run."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[3] / ".github/workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def read(path: Path) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def test_there_is_one_for_changes_and_one_for_releases() -> None:
    assert [path.name for path in FILES] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_action_is_of_one_version(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert [u for u in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", u)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_job_may_more_than_read_but_the_one_that_publishes(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    more = {
        name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job
    }
    assert more == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})
    assert "secrets." not in path.read_text(encoding="utf-8")
    kept = [s for s in steps(path) if s.get("uses", "").startswith("actions/checkout")]
    assert all(step["with"]["persist-credentials"] is False for step in kept)


def test_what_is_published_is_what_was_checked_and_nothing_is_built_beside_the_token() -> None:
    jobs = read(FOLDER / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == "verify"
    assert jobs["verify"]["needs"] == "build"
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]
    built = [name for name, job in jobs.items() if "-m build" in str(job)]
    assert built == ["build"]
    assert '.ci/check-dist dist "$TAG"' in jobs["verify"]["steps"][-1]["run"]


def test_a_release_is_a_tag_that_looks_like_a_version() -> None:
    on = read(FOLDER / "release.yml")[True]  # YAML 1.1 reads the key `on` so
    assert on == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+*"]}}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_pythons_are_those_of_the_classifiers(path: Path, repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c]
    jobs = read(path)["jobs"].values()
    strategies = [job["strategy"]["matrix"] for job in jobs if "strategy" in job]
    matrices = [matrix["python"] for matrix in strategies if "python" in matrix]
    assert matrices
    assert all(matrix == named for matrix in matrices)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_they_run_is_there(path: Path, repo_root: Path) -> None:
    text = "\n".join(step["run"] for step in steps(path) if "run" in step)
    for script in re.findall(r"(\.ci/[\w-]+)", text):
        assert os.access(repo_root / script, os.X_OK), script
    makefile = (repo_root / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", text):
        assert f"\n{target}:" in makefile
