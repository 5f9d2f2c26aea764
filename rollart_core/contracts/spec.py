"""What every registered plugin says of itself: an id, a lazy class, a config model.

Takes: nothing. Gives: the spec records that registering hooks return. Never: imports the class a
spec names; :mod:`rollart_core.plugins.registry` does that, when a run needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

PLUGIN_API: Final = 2
"""The version of the plugin API that this RollArt speaks; a spec for a newer one is refused."""
OLDEST_PLUGIN_API: Final = 1
"""The oldest version for which a plugin may be written and still works; see docs/plugin-api.md."""

ID_PATTERN = re.compile(
    r"^(?P<namespace>[a-z0-9][a-z0-9_-]*)/(?P<name>[A-Za-z0-9][\w-]*)-v(?P<version>\d+)$",
    re.ASCII,  # names of classes, images and files are made of it
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One thing a plugin offers."""

    id: str
    """``namespace/Name-vN``."""
    entry_point: str
    """``"module:Class"``, imported when first used."""
    config: str | None = None
    """``"module:Model"``: a pydantic model, in a module free of torch, that checks the options."""
    summary: str = ""
    """One sentence for ``rollart list``."""
    alias: str | None = None
    """A short name for config files, unique in its kind, such as ``grpo``."""
    contract_version: int = 0
    """The plugin API it was written for, ``rollart_core.PLUGIN_API`` of that time. 0: what its hook
    module says with ``CONTRACT_VERSION = 2`` at its top; where that says nothing either, 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command that a plugin adds to ``rollart``; its code is imported when it is called."""

    name: str
    entry_point: str
    """``"module:app"``: a typer app or a function."""
    summary: str = ""
