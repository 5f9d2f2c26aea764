"""RollArt: a plugin-based gym platform for training LLM agents with reinforcement learning.

Takes: an environment's id. Gives: :func:`make`, and the supported versions of the plugin API.
Never: imports other RollArt modules before their first use, because every import runs this module
first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollart_core.contracts.spec import OLDEST_PLUGIN_API, PLUGIN_API
from rollart_core.plugins import old_names

if TYPE_CHECKING:
    from rollart_core.contracts.env import TextEnv

__all__ = ["OLDEST_PLUGIN_API", "PLUGIN_API", "make"]


old_names.install()


def make(env_id: str, /, **options: object) -> TextEnv:
    """Create an environment by id, alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``.

    Args:
        env_id: Such as ``"webshop/WebShop-v1"`` or ``"gymnasium::Taxi-v3"``.
        options: Options of the environment.

    Raises:
        rollart_core.errors.UserError: If there is no such environment, or an option is invalid.
    """
    # Imported here because every command runs `import rollart_core` first, including `--help`.
    from rollart_core.plugins import registry

    return registry.make(env_id, **options)
