"""The adapter of TextArena; see ``sessions/textarena.py``.

Takes: options of ``textarena::ID``. Gives: the config model and the adapter.
Never: imports TextArena. The session does that, in this Python or in another one.
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
    """Whether each observation contains the whole game so far, as TextArena's own wrapper formats
    it. false: only the new messages, because the conversation contains the rest."""


class TextArenaAdapter(ForeignAdapter):
    """Single-player games of ``textarena.make``."""

    session: ClassVar[str] = "textarena"
    options: ClassVar[type[AdapterOptions]] = TextArenaOptions
    module: ClassVar[str] = "textarena"
    package: ClassVar[str] = "textarena"
