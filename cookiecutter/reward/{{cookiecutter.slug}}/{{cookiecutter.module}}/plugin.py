"""Declare the plugins of this package to RollArt, as listed in rollart.yaml."""

from rollart_core.contracts.reward import RewardSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_rewards() -> list[RewardSpec]:
    """Return the rewards of this package."""
    return specs(__package__, "rewards")
