"""Sections of a run config that say which environments it has, one or several.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: imports a plugin's code: the options of an environment are checked where it is found.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag, model_validator

from rollart_core.config.base import Name, PluginRef, Positive, PositiveInt, Seconds, Section
from rollart_core.config.training import Shaping
from rollart_core.contracts.adapter import SEPARATOR


class EnvRun(Section):
    """What of the run is otherwise for one environment of several."""

    split: Name | None = None
    """Tasks to train on; none: ``rollout.split``."""
    max_turns: PositiveInt | None = None
    """None: ``rollout.max_turns``, or what the environment's spec says."""
    evaluation_split: Name | None = None
    """Held-out tasks; none: ``evaluation.split``."""
    validation_split: Name | None = None
    """Tasks of validations; none: ``evaluation.validation_split``."""
    check_split: Name | None = None
    """Tasks of the warm start's checks; none: ``warm_start.check_split``."""
    reset_s: Seconds | None = None
    """None: ``deadlines.reset_s``, or what the environment's spec says."""
    step_s: Seconds | None = None
    """None: ``deadlines.step_s``, or what the environment's spec says."""
    reward: PluginRef | None = None
    """None: the run's ``reward``."""
    shaping: Shaping | None = None
    """None: the run's ``shaping``."""
    algorithm: dict[str, Any] | None = None
    """Options of the run's algorithm that are otherwise for this environment."""


class EnvEntry(PluginRef):
    """One environment of several; keys that are not here are its own options."""

    name: Name | None = None
    """What tasks, reports and the placement call it; none: its id, with ``#`` and its place in the
    list where the same id stands more than once."""
    weight: Positive = 1.0
    """Its share of all tasks, against the weights of the others."""
    run: EnvRun = EnvRun()
    """What of the run is otherwise for this environment."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_adapter(cls, value: Any) -> Any:
        return joined_id(value)


def joined_id(value: Any) -> Any:
    """Return ``{adapter: gem, id: X}`` as ``{id: gem::X}``; anything else as it is.

    Raises:
        ValueError: When adapter and id do not go together.
    """
    if not isinstance(value, dict) or "adapter" not in value:
        return value
    rest = {k: v for k, v in value.items() if k != "adapter"}
    adapter, foreign = value["adapter"], rest.get("id")
    if not isinstance(adapter, str) or not isinstance(foreign, str):
        raise ValueError(
            "adapter and id go together: {adapter: gymnasium, id: FrozenLake-v1}, both text"
        )
    if SEPARATOR in foreign:
        raise ValueError(f"id {foreign!r} names an adapter already: leave env.adapter out")
    return {**rest, "id": f"{adapter}{SEPARATOR}{foreign}"}


def _which_env(value: object) -> str:
    """Return the class of ``env``: one environment, or a list of several."""
    return "EnvEntry" if isinstance(value, list | tuple) else "PluginRef"


Env = Annotated[
    Annotated[PluginRef, Tag("PluginRef")] | Annotated[tuple[EnvEntry, ...], Tag("EnvEntry")],
    Discriminator(_which_env),
]
