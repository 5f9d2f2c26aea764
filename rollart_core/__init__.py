"""RollArt: a plugin-based gym platform for training LLM agents with reinforcement learning.

Takes: an environment's id, or a dataset and a reward function. Gives: :func:`make`, :func:`fit`,
and the supported versions of the plugin API.
Never: imports other RollArt modules before their first use, because every import runs this module
first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollart_core.contracts.spec import OLDEST_PLUGIN_API, PLUGIN_API
from rollart_core.plugins import old_names

if TYPE_CHECKING:
    from rollart_core.contracts.env import TextEnv
    from rollart_core.runtime.report import RunReport

__all__ = ["OLDEST_PLUGIN_API", "PLUGIN_API", "fit", "make"]


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


def fit(model: Any, dataset: Any, reward: Any = None, **settings: Any) -> RunReport:
    """Train a model on a dataset with a reward function.

    Args:
        model: A model's folder or hub id, or the section ``model`` of a run config.
        dataset: A file, a folder or a hub id as in the option ``file`` of ``text/Questions-v1``, a
            dataset of ``datasets``, rows as mappings, or split -> one of these.
        reward: A function or coroutine function, a reward as in a run config, or a list of them.
        settings: Further keys of the run config, such as ``stop={"batches": 100}``; of a list of
            rewards, ``reward_weights``.

    Raises:
        rollart_core.errors.UserError: If the run cannot start.
    """
    from rollart_core.plugins import registry

    call = registry.resolve("environments", "questions").fit
    report: RunReport = call(model, dataset, reward, **settings)
    return report
