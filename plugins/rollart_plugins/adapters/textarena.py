"""The adapter of TextArena: see ``sessions/textarena.py`` for what it does.

Takes: options of ``textarena::ID``. Gives: their model, and the adapter. Never: makes or imports
what is foreign: the session does, here or in another Python.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter


class TextArenaOptions(AdapterOptions):
    """Options of ``textarena::ID``."""

    make: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `textarena.make`, such as `{max_turns: 5}`."""
    history: bool = False
    """Show the whole game so far in each observation, as TextArena's own wrapper of the id writes
    it; false: only what is new, since a conversation holds the rest."""


class TextArenaAdapter(ForeignAdapter):
    """Games of ``textarena.make`` for one player."""

    session: ClassVar[str] = "textarena"
    options: ClassVar[type[AdapterOptions]] = TextArenaOptions
    module: ClassVar[str] = "textarena"
    package: ClassVar[str] = "textarena"
