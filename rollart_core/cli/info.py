"""``rollart info``: what one plugin says of itself, and the options it takes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import asdict
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from rollart_core import registry
from rollart_core.cli.output import plain, print_json, print_table
from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import PluginError, UnknownIdError, UserError, did_you_mean
from rollart_core.plugins import KINDS, Registered, plugins


def info(
    plugin_id: Annotated[str, typer.Argument(metavar="ID", help="An id, or an alias.")],
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
                tuple(str(o[c]) for c in ("name", "type", "default", "help")) for o in options
            ]
            print_table("options", columns, rows_of)


def _find(plugin_id: str) -> list[Registered]:
    """Return what has this id or alias, in every kind."""
    found, known, broken = [], [], None
    for kind in KINDS:
        try:
            registered = registry.find(kind, plugin_id)
            if registered.plugin.distribution != "unregistered":
                found.append(registered)
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


def _describe(registered: Registered) -> dict[str, object]:
    plugin = registered.plugin
    spec = asdict(registered.spec)
    return {
        "is": registry.SINGULAR[registered.kind],
        "from": f"{plugin.distribution} {plugin.version} (plugin {plugin.name})",
        **spec,
        "options": _options(registered),
    }


def _options(registered: Registered) -> list[dict[str, object]] | str | None:
    if not isinstance(registered.spec, PluginSpec):
        return None
    try:
        model = registry.config_model(registered.kind, registered.key)
    except UserError as e:
        return str(e)
    return None if model is None else _fields(model)


def _fields(model: type[BaseModel]) -> list[dict[str, object]]:
    meanings = _attribute_docstrings(model)
    return [
        {
            "name": name,
            "type": _type_name(field.annotation),
            "default": "required" if field.is_required() else repr(field.get_default()),
            "help": field.description or meanings.get(name, ""),
        }
        for name, field in model.model_fields.items()
    ]


def _attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the string that stands below each field, as the house writes its docs."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source to read: a model made on the fly
        return {}
    found = {}
    for field, below in pairwise(getattr(body, "body", [])):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


def _type_name(annotation: Any) -> str:
    """Return a type as a config file's author reads it: ``int or null``, ``'a' or 'b'``."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_name(a) for a in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if annotation is NoneType:
        return "null"
    return getattr(annotation, "__name__", str(annotation))
