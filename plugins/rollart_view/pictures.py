"""What all pictures share: matplotlib asked for kindly, smoothed lines, files that are whole.

Takes: numbers. Gives: figures and files. Never: needs a display, or leaves half a picture behind.
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
        who: The command that draws, for the error.
        extra: The extra of our distribution that brings matplotlib.
        options: The figure's own.

    Raises:
        UserError: When matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError(f"{who} draws with matplotlib: pip install 'rollart[{extra}]'") from e
    return Figure(**options)


def save(figure: Any, path: Path, *, dpi: int = 120) -> None:
    """Write a picture beside and rename it; one that is there is replaced.

    Raises:
        UserError: When it cannot be written, or is of no known kind.
    """
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a picture ends in {', '.join(FORMATS)}")
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
    """Return the mean of up to ``over`` neighbours at each place (fewer at the ends)."""
    half = over // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
