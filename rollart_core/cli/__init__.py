"""The command line: parse arguments, call the code, print the result; no other logic.

Takes: ``sys.argv``. Gives: an exit code: 0 for success, 1 for failure (with one line on stderr that
says what the user can fix), 2 for a command line that does not parse. Never: imports a command
before it is called, or a plugin to show ``--help``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollart_core.cli.commands import COMMANDS as COMMANDS

if TYPE_CHECKING:
    import typer


def build_app() -> typer.Typer:
    """Return the typer app."""
    from rollart_core.cli.app import build_app

    return build_app()


def main() -> None:
    """Run the command line and exit."""
    try:
        if _listed(sys.argv[1:]):
            sys.exit(0)
        from rollart_core.cli.app import run_app

        run_app()
    except Exception as e:
        from rollart_core.errors import RollartError, first_line

        # An OSError with a file name refers to a file given on the command line.
        said = str(e) if isinstance(e, RollartError) else None
        if isinstance(e, OSError) and e.filename is not None:
            said = f"{first_line(str(e.filename), 200)}: {e.strerror}"
        if said is None or os.environ.get("ROLLART_TRACEBACK"):
            raise
        from rollart_core.cli.output import visible

        lines = [f"Error: {visible(line)}" for line in said.splitlines()]
        print("\n".join(lines), file=sys.stderr)
        sys.exit(1)


def _listed(arguments: Sequence[str]) -> bool:
    """Run a plain ``rollart list`` without typer, whose import takes as long as the rest.

    Typer handles all other arguments, including help and mistakes.
    """
    kinds = [argument for argument in arguments[1:] if argument != "--json"]
    if arguments[:1] != ["list"] or len(kinds) > 1 or any(k.startswith("-") for k in kinds):
        return False
    from rollart_core.cli.listing import show

    show(kinds[0] if kinds else None, as_json="--json" in arguments)
    return True
