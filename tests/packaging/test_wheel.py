"""The wheel, built from what git tracks and installed into a fresh virtual environment."""

from __future__ import annotations

import json
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from fresh_venvs import clean_environ, sh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IMPORT_PACKAGES = {
    *("rollart_core", "rollart_envs", "rollart_rewards", "rollart_algorithms", "rollart_plugins"),
    *("rollart_bench", "rollart_cpu", "rollart_planner", "rollart_ray", "rollart_registry"),
    *("rollart_evals", "rollart_sandboxes", "rollart_testing", "rollart_view"),
}


def test_the_wheel_holds_the_import_packages_and_nothing_else(wheel: Path) -> None:
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


def test_every_tracked_template_is_in_the_wheel_where_the_scaffold_looks(
    tracked: Path, wheel: Path
) -> None:
    templates = {
        f"rollart_plugins/cookiecutter/{path.relative_to(tracked / 'cookiecutter')}"
        for path in (tracked / "cookiecutter").rglob("*")
        if path.is_file()
    }
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if "/cookiecutter/" in n}
    assert inside == templates


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
        env=clean_environ(),
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
