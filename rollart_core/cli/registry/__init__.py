"""``rollart registry``: publish to a community registry, install from one, or run one."""

from rollart_core.cli.registry import operating, owning, using
from rollart_core.cli.registry.options import app

__all__ = ["app", "operating", "owning", "using"]
