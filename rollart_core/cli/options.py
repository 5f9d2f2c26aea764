"""``key=value`` arguments of commands.

Takes: what stood on the command line. Gives: a mapping, as the same keys of a file would. Never:
knows what the keys mean; who they are for checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollart_core.config.load import apply_override


def as_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` arguments as a mapping; dotted keys nest, values are YAML.

    Raises:
        ConfigError: When one is not ``key=value``.
    """
    options: dict[str, Any] = {}
    for argument in arguments:
        apply_override(options, argument)
    return options
