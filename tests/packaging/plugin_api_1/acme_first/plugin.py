"""Tells RollArt what this package brings."""

from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import RewardBackendSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return the environments of this package."""
    return specs(__package__, "environments")


@hookimpl
def rollart_algorithms() -> list[AlgorithmSpec]:
    """Return the algorithms of this package."""
    return specs(__package__, "algorithms")


@hookimpl
def rollart_reward_backends() -> list[RewardBackendSpec]:
    """Return the reward backends of this package."""
    return specs(__package__, "reward_backends")
