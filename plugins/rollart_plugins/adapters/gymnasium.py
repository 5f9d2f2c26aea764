"""The adapter of Gymnasium: see ``sessions/gym.py`` for what it does.

Takes: options of ``gymnasium::ID``. Gives: their model, and the adapter. Never: makes or imports
what is foreign: the session does, here or in another Python.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from rollart_core.config.base import NonNegative
from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter


class GymnasiumOptions(AdapterOptions):
    """Options of ``gymnasium::ID``."""

    make: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`, such as `{is_slippery: false}`."""
    actions: list[str] | None = None
    """Names of the Discrete actions, in order. none: the usual ones of Gymnasium's own
    environments, else numbers (which are understood in any case)."""
    observation: Literal["auto", "ansi", "value"] = "auto"
    """`ansi`: as it draws itself; `value`: the observation's numbers; `auto`: words for Taxi and
    Blackjack, else a drawing where there is one, else the value."""
    reward: Literal["native", "relative"] = "native"
    """`relative`: 0 until the end, and then the share of what could be won from this start: 1 for
    the best return, 0 for as little as never finishing gives. Needs a transition table without
    chance."""
    invalid_penalty: NonNegative | None = None
    """Taken off the reward for what is no action; the environment waits. none: as much as its worst
    step costs, where a transition table tells, else 1."""


class GymnasiumAdapter(ForeignAdapter):
    """Environments of ``gymnasium.make`` with Discrete or Text actions."""

    session: ClassVar[str] = "gym"
    options: ClassVar[type[AdapterOptions]] = GymnasiumOptions
    module: ClassVar[str] = "gymnasium"
    package: ClassVar[str] = "gymnasium"
