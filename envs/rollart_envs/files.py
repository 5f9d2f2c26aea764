"""Check the files that an environment's options name.

Takes: a path. Gives: the problem with it, for a config model's ``missing()``. Never: opens a
file.
"""

from __future__ import annotations

from pathlib import Path


def missing_files(**named: Path | None) -> dict[str, str]:
    """Return a problem for each option whose file is missing.

    Args:
        named: Option -> the file that it names; None: no file.
    """
    return {
        option: f"{path} is a folder, not a file" if path.is_dir() else f"there is no file {path}"
        for option, path in named.items()
        if path is not None and not path.is_file()
    }
