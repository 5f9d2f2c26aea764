"""The built-in reward functions."""

from rollart_core.contracts.reward import RewardSpec
from rollart_core.hookspecs import hookimpl


@hookimpl
def rollart_rewards() -> list[RewardSpec]:
    """Return the built-in reward functions."""
    return [
        RewardSpec(
            id="rollart/EnvReturn-v1",
            alias="env-return",
            entry_point="rollart_rewards.env_return:EnvReturn",
            config="rollart_rewards.config:EnvReturnConfig",
            summary="The environment's own return, weighed against its success.",
        ),
    ]
