"""The built-in algorithms."""

from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.hookspecs import hookimpl


@hookimpl
def rollart_algorithms() -> list[AlgorithmSpec]:
    """Return the built-in algorithms."""
    return [
        AlgorithmSpec(
            id="rollart/GRPO-v1",
            alias="grpo",
            entry_point="rollart_algorithms.grpo:GRPO",
            config="rollart_algorithms.config:GRPOConfig",
            summary="Group relative policies, with clip-higher and truncated importance sampling.",
            paper="arXiv:2402.03300",
        ),
    ]
