"""Tells RollArt what this package brings; rollart.yaml says it."""

from rollart_core.contracts.env import EnvSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return the environments of this package."""
    return specs(__package__, "environments")
