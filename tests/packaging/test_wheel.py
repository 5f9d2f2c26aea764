"""The wheel, built from what git tracks and installed into a fresh virtual environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IMPORT_PACKAGES = {
    *("rollart_core", "rollart_envs", "rollart_rewards", "rollart_algorithms", "rollart_plugins"),
}


def sh(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command, without the environment's Python paths; return its stdout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ROLLART"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def wheel(tracked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files."""
    out = tmp_path_factory.mktemp("wheel")
    sh(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tracked)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(repo_root: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its dependencies, installed offline."""
    wheelhouse = repo_root / ".wheelhouse"
    if not (wheelhouse / ".complete").exists():
        pytest.skip("no wheelhouse: `make wheelhouse` fetches it")
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    offline = ("--no-index", "--no-compile", "--find-links", wheelhouse)
    sh(python, "-m", "pip", "install", "-q", *offline, wheel)
    return folder


def test_the_wheel_holds_the_five_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == IMPORT_PACKAGES
    assert not [n for n in names if n.split("/")[1:2] == ["tests"]]


def test_every_tracked_file_of_a_package_is_in_the_wheel(tracked: Path, wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    roots = [tracked, *(tracked / r for r in ("envs", "rewards", "algorithms", "plugins"))]
    missing = [
        str(path.relative_to(root))
        for root in roots
        for package in root.glob("rollart_*")
        for path in package.rglob("*")
        if path.is_file() and str(path.relative_to(root)) not in inside
    ]
    assert missing == []


def test_nothing_leaks_into_site_packages_but_our_packages(fresh: Path) -> None:
    code = (
        "from importlib.metadata import files; import json;"
        "print(json.dumps(sorted({f.parts[0] for f in files('rollart')})))"
    )
    tops = set(json.loads(sh(fresh / "bin/python", "-c", code, cwd=fresh)))
    ours = {t for t in tops if not t.endswith(".dist-info") and t != ".."}
    assert ours == IMPORT_PACKAGES


def test_it_lists_checks_and_makes_environments_without_torch(fresh: Path, tmp_path: Path) -> None:
    listed = json.loads(sh(fresh / "bin/rollart", "list", "--json", cwd=tmp_path))
    assert listed["broken"] == []
    assert "webshop/WebShop-v1" in {e["id"] for e in listed["environments"]}
    code = (
        "import rollart_core; env = rollart_core.make('frozenlake');"
        "observation, _ = env.reset(seed=0); env.close(); print(len(str(observation)) > 0)"
    )
    assert sh(fresh / "bin/python", "-c", code, cwd=tmp_path).strip() == "True"
    absent = "from importlib.util import find_spec; print(find_spec('torch'))"
    assert sh(fresh / "bin/python", "-c", absent, cwd=tmp_path).strip() == "None"


def test_a_run_without_torch_says_how_to_get_it(fresh: Path, tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text("env: frozenlake\nmodel: {kind: new}\nstop: {batches: 1}\n")
    done = subprocess.run(
        [fresh / "bin/rollart", "run", config, "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'rollart[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_the_projects(fresh: Path, repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert sh(fresh / "bin/rollart", "--version").strip() == f"rollart {project['version']}"
