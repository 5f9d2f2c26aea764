"""``rollart plot``: the course of runs as a picture.

Takes: run directories. Gives: a file. Never: draws itself; ``view/`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="x.png, x.svg or x.pdf; plot.png in the run's directory, or here for several.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Draw reward, success, staleness, tokens a second and loss by train_step.

    Example: rollart plot runs/hello-20260101-120000 --out hello.svg
    """
    from rollart_view.plot import plot as drawn

    path = out or (runs[0] / "plot.png" if len(runs) == 1 else Path("plot.png"))
    drawn(runs, path)
    typer.echo(str(path))
