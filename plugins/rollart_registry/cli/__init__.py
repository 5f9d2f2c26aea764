"""``rollart registry``: publish to a community registry, install from one, or run one.

Takes: the modules beside it, whose commands register themselves. Gives: the typer app. Never:
imports TUF or cryptography before one of them runs.
"""

from rollart_registry.cli import operating, owning, using
from rollart_registry.cli.options import app

__all__ = ["app", "operating", "owning", "using"]
