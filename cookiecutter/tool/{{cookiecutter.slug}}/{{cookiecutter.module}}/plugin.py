"""Declare the plugins of this package to RollArt, as listed in rollart.yaml."""

from rollart_core.contracts.env import EnvSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return the environments of this package."""
    return specs(__package__, "environments")
