"""The built-in reward functions.

Takes: ``rollart.yaml`` in the same folder. Gives: the specs. Never: imports a reward.
"""

from rollart_core.contracts.reward import RewardSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_rewards() -> list[RewardSpec]:
    """Return the built-in reward functions."""
    return specs(__package__, "rewards")
