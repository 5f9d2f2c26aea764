"""``rollart list``: list installed plugins.

Takes: a kind, or none for all. Gives: the output of ``cli/listing.py``. Never: imports the code of
a plugin's spec.
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
    """List installed plugins and their packages by kind, and show which plugins are broken."""
    show(kind, as_json=as_json)
