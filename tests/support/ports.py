"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from typing import Final

_PORTS: Final = range(20_000, 32_000)
"""Below those that Linux gives to connections, and that other programs may have by then."""
_random: Final = random.SystemRandom()


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    while True:
        port = _random.choice(_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
