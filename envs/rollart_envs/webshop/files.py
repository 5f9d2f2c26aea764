"""The official files: their names and paths.

Takes: a folder. Gives: paths. Never: opens a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FIRST_1000: Final = (
    "items_shuffle_1000*.json",
    "items_ins_v2_1000*.json",
    "items_human_ins_1000*.json",
)
_ALL: Final = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")


def find_files(data_dir: Path) -> tuple[Path, Path, Path]:
    """Return the files of products, of attributes and of human instructions.

    The files of 1,000 products are used if they exist, else those of all products.

    Raises:
        ValueError: If the folder does not exist, or one of the files is missing.
    """
    if not data_dir.is_dir():
        raise ValueError(f"no such folder: {data_dir}")
    products, attributes, human = (
        _find(data_dir, pattern, whole) for pattern, whole in zip(_FIRST_1000, _ALL, strict=True)
    )
    return products, attributes, human


def _find(data_dir: Path, pattern: str, whole: str) -> Path:
    found = sorted(data_dir.glob(pattern)) or sorted(data_dir.glob(whole))
    if not found:
        raise ValueError(
            f"{data_dir} has no {pattern} (nor {whole}); it must have the official WebShop files"
        )
    return found[0]
