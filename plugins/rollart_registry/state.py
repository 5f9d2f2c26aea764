"""Where it is kept which registries this person trusts.

Takes: the environment. Gives: a path. Never: makes it.
"""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder that keeps the trusted registries of this person."""
    config = os.environ.get("ROLLART_CONFIG_DIR")
    if config:
        return _plain(config) / "registries"
    home = os.environ.get("XDG_CONFIG_HOME")
    return (_plain(home) if home else Path.home() / ".config") / "rollart" / "registries"


def _plain(folder: str) -> Path:
    """Return a path as pip names it too: from the root, without ``~`` and ``..``."""
    return Path(os.path.abspath(os.path.expanduser(folder)))
