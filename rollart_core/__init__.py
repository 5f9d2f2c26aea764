"""RollArt: a plugin-based gym platform for training LLM agents with reinforcement learning.

Takes: an environment's id. Gives: :func:`make`, and which versions of the plugin API are spoken.
Never: imports anything else of RollArt before it is asked, for everything imports this first.
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
    """Make an environment by id, alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``.

    Args:
        env_id: Such as ``"webshop/WebShop-v1"`` or ``"gymnasium::Taxi-v3"``.
        options: The environment's own options.

    Raises:
        rollart_core.errors.UserError: When there is no such environment, or an option is wrong.
    """
    # Imported here, because `import rollart_core` comes before everything else, `--help` included.
    from rollart_core.plugins import registry

    return registry.make(env_id, **options)
