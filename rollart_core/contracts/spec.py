"""The spec of every registered plugin: an id, a lazily imported class, a config model.

Takes: nothing. Gives: the spec records that registering hooks return. Never: imports the class of a
spec; :mod:`rollart_core.plugins.registry` does when a run needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

PLUGIN_API: Final = 2
"""The plugin API version of this RollArt. Specs with a newer version are rejected."""
OLDEST_PLUGIN_API: Final = 1
"""The oldest supported plugin API version. See ``docs/reference/plugin-api.md``."""

ID_PATTERN = re.compile(
    r"^(?P<namespace>[a-z0-9][a-z0-9_-]*)/(?P<name>[A-Za-z0-9][\w-]*)-v(?P<version>\d+)$",
    re.ASCII,  # names of classes, images and files contain it
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One component that a plugin provides."""

    id: str
    """The id, of the form ``namespace/Name-vN``."""
    entry_point: str
    """The class as ``"module:Class"``, imported at its first use."""
    config: str | None = None
    """The pydantic model that validates the options, as ``"module:Model"``. Its module must not
    import torch."""
    summary: str = ""
    """One sentence for ``rollart list``."""
    alias: str | None = None
    """A short name for config files, such as ``grpo``, unique in its kind."""
    contract_version: int = 0
    """The plugin API version that the plugin uses. 0 means the value of ``CONTRACT_VERSION`` in its
    hook module, or 1 if the module has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command that a plugin adds to ``rollart``. Its code is imported when it is called."""

    name: str
    entry_point: str
    """A typer app or a function, as ``"module:app"``."""
    summary: str = ""
