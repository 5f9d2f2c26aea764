"""RollArt: a plugin-based gym platform for training LLM agents with reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollart_core.contracts.env import TextEnv

__all__ = ["make"]


def make(env_id: str, /, **options: object) -> TextEnv:
    """Make an environment by id, alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``.

    Args:
        env_id: Such as ``"webshop/WebShop-v1"`` or ``"gymnasium::Taxi-v3"``.
        options: The environment's own options.

    Raises:
        rollart_core.errors.UserError: When there is no such environment, or an option is wrong.
    """
    # Imported here, because `import rollart_core` comes before everything else, `--help` included.
    from rollart_core import registry

    return registry.make(env_id, **options)
