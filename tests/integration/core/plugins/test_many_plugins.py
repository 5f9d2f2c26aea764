"""50 packages and a broken one installed: the listing shows them all, and why the one is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart_bench import start

ROLLART = [sys.executable, "-c", "from rollart_core.cli import main; main()"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    start.install(folder, start.NUM_PLUGINS)
    return folder


def rollart(packages: Path, *arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(packages), "COLUMNS": "200"}
    done = subprocess.run(
        [*ROLLART, *arguments], capture_output=True, text=True, check=True, env=environ
    )
    return done.stdout


def listed(packages: Path) -> dict[str, list[dict[str, Any]]]:
    loaded: dict[str, list[dict[str, Any]]] = json.loads(rollart(packages, "list", "--json"))
    return loaded


def test_all_packages_are_listed_beside_the_built_ins(packages: Path) -> None:
    found = listed(packages)
    ids = {plugin["id"] for plugin in found["environments"]}
    wanted = {f"many-{n:02}/Walk-v1" for n in range(start.NUM_PLUGINS)}
    assert wanted | {"toy/FrozenLake-v1", "webshop/WebShop-v1"} <= ids
    (one,) = [p for p in found["rewards"] if p["id"] == "many-07/Short-v1"]
    assert (one["distribution"], one["version"], one["plugin"]) == ("many-07", "1.0", "many-07")


def test_the_broken_one_is_named_with_its_reason_and_spoils_nothing(packages: Path) -> None:
    (broken,) = listed(packages)["broken"]
    assert (broken["plugin"], broken["distribution"]) == ("shattered", "shattered")
    assert "cannot import shattered.plugin: ModuleNotFoundError" in broken["reason"]
    assert "a_module_that_nobody_has" in broken["reason"]
    for_people = rollart(packages, "list")
    assert "many-49/Walk-v1" in for_people
    assert "cannot import shattered.plugin" in for_people


def test_a_listing_imports_neither_the_packages_classes_nor_what_is_slow(packages: Path) -> None:
    code = (
        "import sys; sys.argv = ['rollart', 'list']\n"
        "from rollart_core.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    environ = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    loaded = set(done.stderr.split())
    assert "many_07.plugin" in loaded
    assert not {"many_07.env", "many_07.config", "numpy", "gymnasium", "pyarrow", "torch"} & loaded


def test_the_benchmark_has_a_row_for_each_mark() -> None:
    result = start.run({"rounds": 1})
    rows: Any = result["rows"]
    assert [row["mark"] for row in rows] == ["< 0.3 s", "< 0.5 s", "< 0.5 s"]
    assert all(row["ours"] > 0 and row["meets_mark"] == (row["ours"] < m) for row, m in
               zip(rows, (0.3, 0.5, 0.5), strict=True))  # fmt: skip
