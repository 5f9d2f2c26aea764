"""``rollart list``: what is installed, of which kind, from which package, broken or not.

Takes: a kind, or none for all. Gives: what ``cli/listing.py`` prints. Never: imports what a spec
names.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rollart_core.cli.listing import show
from rollart_core.plugins.manager import KINDS


def list_plugins(
    kind: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(KINDS)}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List what is installed, of which kind, from which package, broken or not."""
    show(kind, as_json=as_json)
