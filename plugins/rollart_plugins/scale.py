"""``rollart scale``: change the number of engines and env workers of a live run.

Takes: the directory of a live run, and target numbers. Gives: the numbers before and after. Never:
starts or ends a worker itself. It sends a request to the run over its socket.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rollart_core.cli.output import print_json, print_table
from rollart_core.errors import UserError


def scale(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a live run.")],
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET=N]...",
            help="engines, env_workers or the name of a pool. Default: show the current numbers.",
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Maximum number of seconds to wait.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Change the number of engines and env workers in a live run.

    New workers load the newest weights before they receive work. Workers that are removed finish
    their work, and their sessions continue on others.
    """
    from rollart_core.runtime.control import ask

    wanted = dict(_target(given) for given in targets or ())
    began = time.monotonic()
    found = ask(run_dir, {"scale": wanted}, timeout_s=timeout_s)
    before, after = found["before"], found["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    if as_json:
        wall_s = time.monotonic() - began
        print_json({"run_dir": str(run_dir), "before": before, "after": after, "wall_s": wall_s})
        return
    rows = [(name, str(before.get(name, 0)), str(count)) for name, count in after.items()]
    print_table(f"{run_dir}", ("", "before", "now"), rows)


def _target(given: str) -> tuple[str, int]:
    """Split ``engines=2``."""
    name, _, count = given.partition("=")
    try:
        return name, int(count)
    except ValueError:
        message = f"{given!r}: give a target and its number, such as engines=2"
        raise UserError(message) from None
