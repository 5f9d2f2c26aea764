"""The adapter of Gymnasium; see ``sessions/gym.py``.

Takes: options of ``gymnasium::ID``. Gives: the config model and the adapter.
Never: makes an environment. The session does that, in this Python or in another one.
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
    """Names of the Discrete actions, in order. If not set, the common names for Gymnasium's own
    environments, otherwise numbers. Numbers are always accepted."""
    observation: Literal["auto", "ansi", "value"] = "auto"
    """Text form of an observation. `ansi`: the environment's text rendering. `value`: the numbers
    of the observation. `auto`: sentences for Taxi and Blackjack, otherwise the rendering if there
    is one, otherwise the value."""
    reward: Literal["native", "relative"] = "native"
    """Reward of a step. `native`: the reward of the environment. `relative`: 0 until the end of the
    episode, then the achieved share of the possible return: 1 for the best return from this start,
    0 for the best return without finishing. `relative` requires a deterministic transition
    table."""
    invalid_penalty: NonNegative | None = None
    """Penalty for an invalid action, which does not change the environment. If not set, the cost of
    the worst step according to the transition table, or 1 without a transition table."""


class GymnasiumAdapter(ForeignAdapter):
    """Environments of ``gymnasium.make`` with Discrete or Text actions."""

    session: ClassVar[str] = "gym"
    options: ClassVar[type[AdapterOptions]] = GymnasiumOptions
    module: ClassVar[str] = "gymnasium"
    package: ClassVar[str] = "gymnasium"
