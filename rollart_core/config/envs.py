"""Sections of a run config that define its environments, one or several.

Takes: plain mappings. Gives: frozen sections, which :mod:`rollart_core.config.run` uses. Never:
imports a plugin's code. The options of an environment are checked when the plugin is resolved.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag, model_validator

from rollart_core.config.base import Name, PluginRef, Positive, PositiveInt, Seconds, Section
from rollart_core.config.training import Shaping
from rollart_core.contracts.adapter import SEPARATOR


class EnvRun(Section):
    """Settings of the run that differ for one environment of several."""

    split: Name | None = None
    """Split of the training tasks. If not set, ``rollout.split`` is used."""
    max_turns: PositiveInt | None = None
    """Maximum number of turns per episode. If not set, ``rollout.max_turns`` or the environment's
    spec is used."""
    evaluation_split: Name | None = None
    """Split of the held-out tasks. If not set, ``evaluation.split`` is used."""
    validation_split: Name | None = None
    """Split of the validation tasks. If not set, ``evaluation.validation_split`` is used."""
    check_split: Name | None = None
    """Split of the tasks for the warm start's checks. If not set, ``warm_start.check_split`` is
    used."""
    reset_s: Seconds | None = None
    """Maximum seconds for a reset. If not set, ``deadlines.reset_s`` or the environment's spec is
    used."""
    step_s: Seconds | None = None
    """Maximum seconds for a step. If not set, ``deadlines.step_s`` or the environment's spec is
    used."""
    reward: PluginRef | None = None
    """Reward of this environment. If not set, the run's ``reward`` is used."""
    shaping: Shaping | None = None
    """Reward shaping of this environment. If not set, the run's ``shaping`` is used."""
    algorithm: dict[str, Any] | None = None
    """Options of the run's algorithm that differ for this environment."""


class EnvEntry(PluginRef):
    """One environment of several; all other keys are its own options."""

    name: Name | None = None
    """Name of the environment in tasks, reports and the placement. If not set, its id is used,
    followed by ``#`` and the index in the list if the same id appears more than once."""
    weight: Positive = 1.0
    """Share of this environment in all tasks, relative to the weights of the others."""
    run: EnvRun = EnvRun()
    """Settings of the run that differ for this environment."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_adapter(cls, value: Any) -> Any:
        return joined_id(value)


def joined_id(value: Any) -> Any:
    """Return ``{adapter: gem, id: X}`` as ``{id: gem::X}``, and any other value unchanged.

    Raises:
        ValueError: If ``adapter`` is given without an ``id``, or ``id`` already names an adapter.
    """
    if not isinstance(value, dict) or "adapter" not in value:
        return value
    rest = {k: v for k, v in value.items() if k != "adapter"}
    adapter, foreign = value["adapter"], rest.get("id")
    if not isinstance(adapter, str) or not isinstance(foreign, str):
        raise ValueError(
            "adapter needs an id, both strings, such as {adapter: gymnasium, id: FrozenLake-v1}"
        )
    if SEPARATOR in foreign:
        raise ValueError(f"id {foreign!r} already names an adapter: remove env.adapter")
    return {**rest, "id": f"{adapter}{SEPARATOR}{foreign}"}


def _which_env(value: object) -> str:
    """Return the class name for ``env``: a single environment or a list of several."""
    return "EnvEntry" if isinstance(value, list | tuple) else "PluginRef"


Env = Annotated[
    Annotated[PluginRef, Tag("PluginRef")] | Annotated[tuple[EnvEntry, ...], Tag("EnvEntry")],
    Discriminator(_which_env),
]
