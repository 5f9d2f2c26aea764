"""The built-in environments, registered as any stranger's package registers its own."""

from rollart_core.contracts.env import EnvSpec, Workload
from rollart_core.hookspecs import hookimpl


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return the built-in environments."""
    return [
        EnvSpec(
            id="webshop/WebShop-v1",
            alias="webshop",
            entry_point="rollart_envs.webshop:WebShopEnv",
            config="rollart_envs.webshop.config:WebShopConfig",
            summary="Shop for a product that fits an instruction (after princeton-nlp/WebShop).",
            max_turns=15,
            splits=("train", "warm", "test"),
            workload=Workload(prefill_tokens=100, decode_tokens=8, turns=5, env_s=0.002),
            licence="Apache-2.0",
        ),
        EnvSpec(
            id="toy/FrozenLake-v1",
            alias="frozenlake",
            entry_point="rollart_envs.toy.frozen_lake:FrozenLakeEnv",
            config="rollart_envs.toy.config:FrozenLakeConfig",
            summary="Walk over a frozen lake to the goal and do not fall in (Gymnasium's).",
            max_turns=20,
            splits=("train", "warm", "test"),
            workload=Workload(prefill_tokens=30, decode_tokens=3, turns=8, env_s=0.0001),
            licence="Apache-2.0",
        ),
        EnvSpec(
            id="toy/Sokoban-v1",
            alias="sokoban",
            entry_point="rollart_envs.toy.sokoban:SokobanEnv",
            config="rollart_envs.toy.config:SokobanConfig",
            summary="Push every box onto a target.",
            max_turns=40,
            splits=("train", "warm", "test"),
            workload=Workload(prefill_tokens=60, decode_tokens=3, turns=15, env_s=0.0001),
            licence="Apache-2.0",
        ),
    ]
