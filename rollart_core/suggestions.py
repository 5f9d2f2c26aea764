"""Suggestions for missing paths: error messages with a fix.

Takes: a path. Gives: an error message with the nearest existing path. Never: opens a file, or
raises for an unreadable folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from rollart_core.errors import NEAR

_CONFIGS = (".yaml", ".yml")


def no_such_file(path: Path) -> str:
    """Return the error message for a missing config file."""
    message = f"{path}: there is no such file"
    if not path.parent.is_dir():
        return f"{message}, nor a folder {path.parent}"
    others = [
        found
        for folder in (path.parent, path.parent / "examples")
        for found in _inside(folder)
        if found.suffix in _CONFIGS
    ]
    return message + _mend(_nearest(path.stem, {other.stem: other for other in reversed(others)}))


def no_run(path: Path, lacks: str) -> str:
    """Return the error message for a folder that is not a run directory.

    Args:
        path: The path that should be a run directory.
        lacks: The missing file that every run directory has.
    """
    message = f"{path} is not a run directory: it has no {lacks}"
    runs = [run for run in _inside(path) if (run / lacks).is_file()]
    if runs:
        last = max(runs, key=lambda run: (run / lacks).stat().st_mtime)
        return f"{message}. The last run in it is {last}"
    others = [
        run
        for folder in (path.parent, path.parent / "runs")
        for run in _inside(folder)
        if (run / lacks).is_file()
    ]
    begun = [run for run in others if path.name and run.name.startswith(path.name)]
    by_name = {other.name: other for other in reversed(others)}
    return message + _mend(max(begun) if begun else _nearest(path.name, by_name))


def _nearest(name: str, others: Mapping[str, Path]) -> Path | None:
    near = get_close_matches(name, list(others), n=1, cutoff=NEAR)
    return others[near[0]] if near else None


def _mend(other: Path | None) -> str:
    return f". Did you mean {str(other)!r}?" if other is not None else ""


def _inside(folder: Path) -> list[Path]:
    """Return the entries of a folder. Empty if it is not a folder or unreadable."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
