"""``rollart info``: what one plugin says of itself, and the options it takes.

Takes: an id, an alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``. Gives: its spec and its options
with their defaults, of every kind that has it. Never: builds it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rollart_core.cli.fields import fields_of
from rollart_core.cli.output import plain, print_json, print_table
from rollart_core.contracts.adapter import split_id
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import PluginError, UnknownIdError, UserError, did_you_mean
from rollart_core.plugins import registry
from rollart_core.plugins.manager import KINDS, Registered, plugins


def info(
    plugin_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="An id, an alias, module:Class or ADAPTER::FOREIGN_ID."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what one plugin says of itself, and the options it takes."""
    found = [_describe(r) for r in _find(plugin_id)]
    if as_json:
        print_json({"id": plugin_id, "found": found})
        return
    for described in found:
        options = described.pop("options")
        rows = [(name, plain(value)) for name, value in described.items()]
        print_table(plugin_id, ("", ""), rows)
        if isinstance(options, list):
            columns = ("option", "type", "default", "meaning")
            rows_of = [
                (o["name"], o["type"], o["default"], " ".join(o["help"].split()).replace("``", "`"))
                for o in options
            ]
            print_table("options", columns, rows_of)


def _find(plugin_id: str) -> list[Registered]:
    """Return what has this id or alias, in every kind."""
    if split_id(plugin_id):
        return [registry.find("environments", plugin_id)]
    if ":" in plugin_id:
        return [_unregistered(plugin_id)]
    found, known, broken = [], [], None
    for kind in KINDS:
        try:
            found.append(registry.find(kind, plugin_id))
        except UnknownIdError:
            known += registry.names(kind)
        except PluginError as e:
            broken = e
    if found:
        return found
    if broken is not None:
        raise broken
    for plugin in plugins().broken:
        if plugin.name == plugin_id:
            raise PluginError(f"plugin {plugin} is broken: {plugin.broken}")
    near = did_you_mean(plugin_id, known)
    raise UnknownIdError(f"nothing called {plugin_id!r} is installed.{near} Try `rollart list`.")


def _unregistered(path: str) -> Registered:
    """Return what ``module:Class`` is, by the base of its class."""
    kind = registry.kind_of(path)
    registered = registry.find(kind if kind in KINDS else "environments", path)
    registry.resolve(registered.kind, path)
    return registered


def _describe(registered: Registered) -> dict[str, object]:
    plugin, said = registered.plugin, registered.spec
    if split_id(registered.key):
        said = registry.env_spec(registered.key)
    spec = asdict(said)
    return {
        "is": _what(registered.kind, said),
        "from": f"{plugin.distribution} {plugin.version} (plugin {plugin.name})",
        **spec,
        "options": _options(registered),
    }


def _what(kind: str, said: object) -> str:
    if isinstance(said, EnvSpec) and said.kind == "agent":
        return "agent environment: a program that owns its loop and asks an endpoint"
    return registry.SINGULAR[kind]


def _options(registered: Registered) -> list[dict[str, object]] | str | None:
    if not isinstance(registered.spec, PluginSpec):
        return None
    try:
        model = registry.config_model(registered.kind, registered.key)
    except UserError as e:
        return str(e)
    return None if model is None else [asdict(field) for field in fields_of(model)]
