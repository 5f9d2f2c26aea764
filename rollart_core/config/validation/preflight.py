"""What a plugin's options name that this machine has not: executables, images, folders.

Takes: a plugin's checked options. Gives: problems. Never: starts, fetches or imports what is named.

A config model may say it by a method ``missing() -> Mapping[str, str]``: option -> what is not
there, and how to mend it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollart_core.config.base import PluginRef
from rollart_core.config.problems import Problem
from rollart_core.errors import UserError
from rollart_core.plugins import registry

_BOXED = ("environments", "reward_backends")
"""Kinds whose option ``sandbox`` names a box to be in."""


def missing(kind: str, plugin_id: str, options: Mapping[str, Any]) -> list[Problem]:
    """Return what is not there, by option.

    Args:
        kind: Of the plugin.
        plugin_id: Its id.
        options: As its config model checked them.
    """
    model = registry.config_model(kind, plugin_id)
    tell = getattr(model, "missing", None)
    found = []
    if model is not None and tell is not None:
        told: Mapping[str, str] = tell(model(**options))
        found = [Problem((option,), message) for option, message in told.items()]
    box = options.get("sandbox") if kind in _BOXED else None
    if box is None:
        return found
    ref = PluginRef.model_validate(box)
    try:
        return found + [p.under("sandbox") for p in missing("sandboxes", ref.id, ref.options)]
    except (UserError, ValueError):  # is told of where the box's options are checked
        return found
