"""``rollart scale``: more or fewer engines and env workers in a run that goes on.

Takes: the directory of a live run, and how many of what there should be. Gives: how many there were
and are. Never: starts or ends a part itself: it asks the run, over its socket.
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
            help="engines, env_workers, or the name of a pool; none: show how many there are.",
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds to wait until it is done.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Add or remove engines and env workers of a live run.

    Those that join load the newest weights before they get work; those that leave finish what they
    have, and their sessions go on elsewhere.
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
        message = f"{given!r}: give what to scale and how many there should be, as in engines=2"
        raise UserError(message) from None
