"""What a plugin's hook gives: is it a spec that can be registered, of this or the last API version?

Takes: a spec. Gives: the fault that keeps it from being used, or the spec as this release has it.
Never: imports the class it names.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Final, cast

from rollart_core.contracts.spec import ID_PATTERN, CommandSpec, PluginSpec
from rollart_core.plugins import api_version as plugin_api

AnySpec = PluginSpec | CommandSpec

RESERVED_COMMANDS: Final = frozenset(
    """run eval list info play new-env new-reward new-algorithm new-mapper check registry plan
    simulate audit view
    build sandbox model plot export scale bench diagnose""".split()  # noqa: SIM905 - one word a command
)
"""Command names that belong to RollArt itself, now or later."""


def text_fault(spec: AnySpec) -> str | None:
    """Return what of a spec is no text and has to be: annotations hold nobody to it."""
    needed = ("name" if isinstance(spec, CommandSpec) else "id", "entry_point")
    for name in (*needed, "alias", "config", "summary"):
        value = getattr(spec, name, None)
        if not isinstance(value, str) and (value is not None or name in needed):
            return f"{name} must be text, got {reprlib.repr(value)}"
    return None


def of_its_version(spec: AnySpec, target: object) -> AnySpec:
    """Return a spec as this release has it, whichever API version its module declares."""
    if isinstance(spec, CommandSpec):
        return spec
    if not spec.contract_version:
        # What the module says may be no number at all, which is told as the fault it is.
        spec = replace(spec, contract_version=cast("int", plugin_api.declared(target)))
    return plugin_api.as_today(spec)


def spec_fault(spec: AnySpec, *, is_own: bool = False) -> str | None:
    """Return why a spec cannot be registered; None when it can.

    Args:
        spec: As a hook gave it.
        is_own: It is of RollArt's own distribution, which may use the names of its own commands.
    """
    if ":" not in spec.entry_point:
        return f"{key_of(spec)}: entry_point {spec.entry_point!r} is not of the form 'module:Class'"
    if isinstance(spec, CommandSpec):
        taken = spec.name in RESERVED_COMMANDS and not is_own
        return f"command {spec.name!r} is one of RollArt's own" if taken else None
    fault = plugin_api.version_fault(spec.contract_version)
    if fault:
        return f"{spec.id} speaks {fault}"
    if not ID_PATTERN.match(spec.id):
        return f"id {spec.id!r} is not of the form 'namespace/Name-vN'"
    return None


def key_of(spec: AnySpec) -> str:
    """Return the id, or the name of a command."""
    return spec.name if isinstance(spec, CommandSpec) else spec.id
