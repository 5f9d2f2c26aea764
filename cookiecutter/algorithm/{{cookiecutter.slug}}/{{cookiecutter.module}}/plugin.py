"""Declare the plugins in rollart.yaml to RollArt. This module must not import torch."""

from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_algorithms() -> list[AlgorithmSpec]:
    """Return the algorithms of this package."""
    return specs(__package__, "algorithms")
