"""``rollart registry``: publish to a community registry, install from one, or run one.

Takes: the modules beside it, whose commands register themselves. Gives: the typer app. Never:
imports TUF or cryptography before one of them runs.
"""

from rollart_core.cli.registry import operating, owning, using
from rollart_core.cli.registry.options import app

__all__ = ["app", "operating", "owning", "using"]
