"""Arguments of several commands: ``key=value`` and a split.

Takes: arguments of the command line. Gives: a mapping, as the same keys of a file would, or an
error. Never: interprets the keys; the code that uses them checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollart_core.config.load import apply_override
from rollart_core.config.resolve_envs import no_split
from rollart_core.contracts.adapter import split_id
from rollart_core.errors import UserError
from rollart_core.plugins import registry


def as_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` arguments as a mapping; dotted keys nest, values are YAML.

    Raises:
        ConfigError: If an argument is not ``key=value``.
    """
    options: dict[str, Any] = {}
    for argument in arguments:
        apply_override(options, argument)
    return options


def check_split(env: str, options: Mapping[str, object], split: str) -> None:
    """Raise UserError for a split that an environment does not have."""
    if ":" in env and split_id(env) is None:
        return  # module:Class has a default spec without its splits
    spec = registry.env_spec(env, options)
    if split not in spec.splits:
        raise UserError(f"--split: {no_split(spec, split)}")
