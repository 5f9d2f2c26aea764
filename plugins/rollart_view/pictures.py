"""Shared helpers of plots: lazy matplotlib import, smoothed lines, atomic files.

Takes: numbers. Gives: figures and files. Never: needs a display, or writes a partial file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from rollart_core.errors import UserError

FORMATS = (".png", ".svg", ".pdf")


def new_figure(who: str, extra: str, **options: Any) -> Any:
    """Return an empty ``matplotlib.figure.Figure``.

    Args:
        who: The command that draws, for the error message.
        extra: The extra of our distribution that installs matplotlib.
        options: Options of the figure.

    Raises:
        UserError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError(f"{who} needs matplotlib: pip install 'rollart[{extra}]'") from e
    return Figure(**options)


def save(figure: Any, path: Path, *, dpi: int = 120) -> None:
    """Write a picture to a temporary file and rename it; an existing one is replaced.

    Raises:
        UserError: If it cannot be written, or its format is unknown.
    """
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: the file name must end in {', '.join(FORMATS)}")
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(beside, dpi=dpi, format=path.suffix[1:])
        os.replace(beside, path)
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}") from e
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """Return the mean of up to ``over`` neighbours at each index (fewer at the ends)."""
    half = over // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
