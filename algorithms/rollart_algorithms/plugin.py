"""The built-in algorithms.

Takes: ``rollart.yaml`` in the same folder. Gives: the specs. Never: imports an algorithm or torch.
"""

from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_algorithms() -> list[AlgorithmSpec]:
    """Return the built-in algorithms."""
    return specs(__package__, "algorithms")
