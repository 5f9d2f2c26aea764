"""Files that an environment's options name.

Takes: a path. Gives: what is wrong with it, for a config model's ``missing()``. Never: opens a
file.
"""

from __future__ import annotations

from pathlib import Path


def missing_files(**named: Path | None) -> dict[str, str]:
    """Return what is not there, by option.

    Args:
        named: Option -> the file it names; None: it names none.
    """
    return {
        option: f"{path} is a folder, and no file" if path.is_dir() else f"there is no file {path}"
        for option, path in named.items()
        if path is not None and not path.is_file()
    }
