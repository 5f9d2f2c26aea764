"""Run one side of a benchmark: a function in a new process, or a run without display or trainer.

Takes: a function's name and plain JSON values; a run config as a mapping. Gives: the function's
result; a report. Never: measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rollart_core.config.load import validate
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.weights import Publication
from rollart_core.errors import ConfigError, RollartError, UserError
from rollart_core.runtime.launch import launch
from rollart_core.runtime.report import RunReport
from rollart_core.types import Group


def in_fresh_process(
    function: str, argument: Mapping[str, object], *, checkout: str = ""
) -> dict[str, Any]:
    """Call ``"module:function"`` in a new process.

    The result is returned in a file, so the function may print.

    Args:
        function: A function from one mapping to another, both plain JSON.
        argument: Its argument.
        checkout: A folder with RollArt at another commit, whose packages are imported there; the
            benchmarks are still these. Empty: the installed packages.

    Raises:
        RollartError: If it failed. Contains the last line that it wrote.
    """
    # Each side sets its own number of threads, whatever this shell's variables are.
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory(prefix="rollart-side-") as folder:
        if checkout:
            (Path(folder) / "rollart_bench").symlink_to(Path(__file__).parent)
            inherited["PYTHONPATH"] = os.pathsep.join((folder, *_package_folders(checkout)))
        path = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, function, json.dumps(argument), str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=inherited,
            check=False,
        )
        if done.returncode or not path.exists():
            text = done.stdout.decode(errors="replace")
            said = [line.strip() for line in text.splitlines() if line.strip()]
            failed = said[-1] if said else "it wrote no output"
            raise RollartError(f"{function} failed: {failed}")
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def checkout_of(bench: str, folder: str) -> str:
    """Return the folder of a checkout as a full path; empty if none is given.

    Raises:
        UserError: If it is not a checkout of RollArt.
    """
    if folder and not (Path(folder) / "rollart_core" / "__init__.py").is_file():
        raise UserError(f"bench {bench}: peer: {folder!r} is not a checkout of RollArt")
    return str(Path(folder).resolve()) if folder else ""


def _package_folders(checkout: str) -> list[str]:
    found = [*Path(checkout).glob("rollart_*"), *Path(checkout).glob("*/rollart_*")]
    return sorted({str(path.parent) for path in found if (path / "__init__.py").is_file()})


def run_mapping(mapping: Mapping[str, object]) -> RunReport:
    """Launch a run config given as plain data, without a display.

    Raises:
        ConfigError: If it is not a valid run config.
    """
    config, problems = validate(mapping)
    if config is None or problems:
        raise ConfigError("\n".join(p.within() for p in problems))
    return launch(resolve_run(config))


def _main(function: str, argument: str, path: str) -> None:
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(json.loads(argument))
    Path(path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])


class NoTrainer:
    """A trainer that publishes immediately."""

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[Any]:
        """Learn nothing."""
        return []

    async def publish(self, policy_version: int) -> Publication:
        """Return that it is alive."""
        return Publication(policy_version, 0, 0.0)
