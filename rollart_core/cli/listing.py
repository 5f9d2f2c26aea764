"""The output of ``rollart list``: installed plugins, their packages, and broken plugins.

Takes: a kind, or none. Gives: columns, or one JSON object. Never: imports typer, or the class of a
plugin.
"""

from __future__ import annotations

from rollart_core.cli.output import print_columns, print_json
from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import UserError, did_you_mean
from rollart_core.plugins.manager import KINDS, Plugin, Registered, plugins


def show(kind: str | None, *, as_json: bool) -> None:
    """Print the list of one kind, or of all.

    Raises:
        UserError: If the kind does not exist.
    """
    loaded = plugins()
    kinds = list(KINDS) if kind is None else [_kind(kind)]
    found = {k: list(loaded.registered(k).values()) for k in kinds}
    if as_json:
        broken = [_broken_dict(p) for p in loaded.broken]
        print_json({**{k: [_dict(r) for r in rs] for k, rs in found.items()}, "broken": broken})
        return
    for k, registered in found.items():
        if registered:
            print_columns(k, ("id", "alias", "from", "what"), [_row(r) for r in registered])
        elif kind is not None:
            print(f"No {k} are installed.")
    if loaded.broken:
        rows = [(p.name, f"{p.distribution} {p.version}", str(p.broken)) for p in loaded.broken]
        print_columns("broken", ("plugin", "from", "why"), rows)


def _kind(given: str) -> str:
    """Return the kind for ``environments``, ``environment`` or ``hardware-mappers``."""
    name = given.replace("-", "_").lower()
    for kind in KINDS:
        if name in {kind, kind.removesuffix("s"), kind.removesuffix("es")}:
            return kind
    near = did_you_mean(name, list(KINDS))
    raise UserError(f"{given!r} is not a kind of plugin.{near} Kinds: {', '.join(KINDS)}.")


def _row(registered: Registered) -> tuple[str, str, str, str]:
    spec, plugin = registered.spec, registered.plugin
    alias = (spec.alias or "") if isinstance(spec, PluginSpec) else ""
    return registered.key, alias, f"{plugin.distribution} {plugin.version}", spec.summary


def _dict(registered: Registered) -> dict[str, object]:
    spec, plugin = registered.spec, registered.plugin
    return {
        "id": registered.key,
        "alias": spec.alias if isinstance(spec, PluginSpec) else None,
        "summary": spec.summary,
        "entry_point": spec.entry_point,
        "plugin": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
    }


def _broken_dict(plugin: Plugin) -> dict[str, object]:
    return {
        "plugin": plugin.name,
        "module": plugin.module,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "reason": plugin.broken,
    }
