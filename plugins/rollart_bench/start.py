"""`rollart bench start`: the duration of `rollart --help` and `rollart list`, as whole processes.

Takes: the number of rounds. Gives: rows in seconds, without other plugins and with 50 additional
packages and a broken one. Never: installs anything outside of a temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row

TAKES: Final = ("rounds", "short")

NUM_PLUGINS = 50
MARK_HELP_S = 0.3
MARK_LIST_S = 0.5

_MANIFEST = """contract_version: 2
licence: Apache-2.0
environments:
  - id: {name}/Walk-v1
    alias: {name}-walk
    entry_point: {module}.env:WalkEnv
    config: {module}.config:WalkConfig
    summary: Walk to the end of the road.
    max_turns: 12
    timeouts: {{reset_s: 5, step_s: 2}}
rewards:
  - id: {name}/Short-v1
    entry_point: {module}.reward:Short
    summary: More for a shorter road.
"""
_HOOKS = """from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_environments():
    return specs(__package__, "environments")


@hookimpl
def rollart_rewards():
    return specs(__package__, "rewards")
"""
_BROKEN = "import a_module_that_nobody_has\n"


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short`` for 3 rounds instead of 15; ``rounds`` for another number.

    Returns:
        The object of ``rollart bench --json``; ``ours`` is the median, and each row also has the
        minimum and maximum.
    """
    asked = Options("start", options)
    rounds = asked.integer("rounds", 3 if asked.short else 15)
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as folder:
        install(Path(folder), NUM_PLUGINS)
        cases = (
            ("rollart --help", ["--help"], None, MARK_HELP_S),
            ("rollart list", ["list"], None, MARK_LIST_S),
            (
                f"rollart list, {NUM_PLUGINS} packages and a broken one more",
                ["list"],
                Path(folder),
                MARK_LIST_S,
            ),
        )
        times: dict[str, list[float]] = {case: [] for case, *_ in cases}
        for number in range(rounds + 1):  # the first round fills the caches and is not counted
            for case, arguments, packages, _ in cases:
                taken = seconds(arguments, packages)
                if number:
                    times[case].append(taken)
        echo(f"{rounds} rounds")
    rows = [_row(case, times[case], mark) for case, _, _, mark in cases]
    return result("start", rows)


def seconds(arguments: Sequence[str], packages: Path | None = None) -> float:
    """Return the duration of one call of ``rollart``, from its start to its end.

    Args:
        arguments: The arguments of ``rollart``.
        packages: A folder of additional packages.

    Raises:
        subprocess.CalledProcessError: If the call fails.
    """
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    if packages is not None:
        environ["PYTHONPATH"] = str(packages)
    command = [sys.executable, "-c", "from rollart_core.cli import main; main()", *arguments]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    return time.perf_counter() - began


def install(folder: Path, num_plugins: int) -> None:
    """Install a number of packages into a folder, in the same form as pip, and a broken one.

    Args:
        folder: A folder for ``PYTHONPATH``.
        num_plugins: Packages ``many-00``, ``many-01``, ...; the broken one is ``shattered``.
    """
    for number in range(num_plugins):
        name = f"many-{number:02}"
        package = _distribution(folder, name, _HOOKS)
        manifest = _MANIFEST.format(name=name, module=package.name)
        (package / "rollart.yaml").write_text(manifest, encoding="utf-8")
    _distribution(folder, "shattered", _BROKEN)


def _distribution(folder: Path, name: str, hooks: str) -> Path:
    """Write a package with an entry point and its metadata; return the package's folder."""
    module = name.replace("-", "_")
    package, info = folder / module, folder / f"{module}-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(hooks, encoding="utf-8")
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "entry_points.txt": f"[rollart]\n{name} = {module}.plugin\n",
        "INSTALLER": "pip\n",
        "RECORD": f"{module}/__init__.py,,\n{module}/plugin.py,,\n",
    }
    for file, text in files.items():
        (info / file).write_text(text, encoding="utf-8")
    return package


def _row(case: str, times: Sequence[float], mark: float) -> dict[str, object]:
    middle = median(times)
    made = row(
        f"{case} ({min(times):.3f} to {max(times):.3f} s)",
        round(middle, 4),
        None,
        None,
        "s",
        mark=f"< {mark} s",
        meets_mark=middle < mark,
    )
    return {**made, "seconds": {"min": min(times), "median": middle, "max": max(times)}}
