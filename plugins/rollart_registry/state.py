"""Locate the folder of the user's trusted registries.

Takes: the environment. Gives: a path. Never: creates it.
"""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder of the user's trusted registries."""
    config = os.environ.get("ROLLART_CONFIG_DIR")
    if config:
        return _plain(config) / "registries"
    home = os.environ.get("XDG_CONFIG_HOME")
    return (_plain(home) if home else Path.home() / ".config") / "rollart" / "registries"


def _plain(folder: str) -> Path:
    """Return an absolute path without ``~`` and ``..``, as pip does."""
    return Path(os.path.abspath(os.path.expanduser(folder)))
