"""``rollart info``: show the spec of one plugin, and its options.

Takes: an id, an alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``. Gives: its spec and its options
with their defaults, for every kind that has it; and the fields of a config model as text for the
author of a config file (also in ``docs/reference/config.md``). Never: builds a plugin.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from rollart_core.cli.output import plain, print_json, print_table
from rollart_core.contracts.adapter import split_id
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import PluginError, UnknownIdError, UserError, did_you_mean
from rollart_core.plugins import registry
from rollart_core.plugins.manager import KINDS, Registered, plugins

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}

_TO_TRAIN = """To train on it, save this as run.yaml and run `rollart run run.yaml`:

  env: {{id: "{}"}}
  model: {{kind: new}}  # for a model that exists: {{path: FOLDER}}
  warm_start: {}  # imitates the environment's oracle() first; remove it if there is none
  stop: {{batches: 100}}"""


def info(
    plugin_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="An id, an alias, module:Class or ADAPTER::FOREIGN_ID."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the spec and the options of a plugin."""
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
        if described["is"] == registry.SINGULAR["environments"]:
            splits = described.get("splits")
            warm = isinstance(splits, list | tuple) and "warm" not in splits
            typer.echo(_TO_TRAIN.format(plugin_id, "{check_split: train}" if warm else "{}"))


def _find(plugin_id: str) -> list[Registered]:
    """Return the plugins with this id or alias, of every kind."""
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
    raise UnknownIdError(f"no plugin {plugin_id!r} is installed.{near} Try `rollart list`.")


def _unregistered(path: str) -> Registered:
    """Return the plugin at ``module:Class``; the base of its class gives the kind."""
    kind = registry.kind_of(path)
    registered = registry.find(kind if kind in KINDS else "environments", path)
    registry.resolve(registered.kind, path)
    return registered


def _describe(registered: Registered) -> dict[str, object]:
    plugin, said = registered.plugin, registered.spec
    if split_id(registered.key):
        said = registry.env_spec(registered.key)
    elif registered.kind == "rewards":
        said = registry.spec("rewards", registered.key)
    spec = asdict(said)
    return {
        "is": _what(registered.kind, said),
        "from": f"{plugin.distribution} {plugin.version} (plugin {plugin.name})",
        **spec,
        "options": _options(registered),
    }


def _what(kind: str, said: object) -> str:
    if isinstance(said, EnvSpec) and said.kind == "agent":
        return "agent environment: a program that owns its loop and calls an endpoint"
    return registry.SINGULAR[kind]


def _options(registered: Registered) -> list[dict[str, object]] | str | None:
    if not isinstance(registered.spec, PluginSpec):
        return None
    try:
        model = registry.config_model(registered.kind, registered.key)
    except UserError as e:
        return str(e)
    return None if model is None else [asdict(field) for field in fields_of(model)]


@dataclass(frozen=True, slots=True)
class FieldHelp:
    """Name, type, default and help of one field."""

    name: str
    type: str
    default: str
    """``required``, or Python's ``repr``."""
    help: str


def fields_of(model: type[BaseModel]) -> list[FieldHelp]:
    """Return the fields of a model, in its order."""
    meanings = _attribute_docstrings(model)
    return [
        FieldHelp(
            name,
            _type_name(field.annotation) + _bounds(field.metadata),
            "required"
            if field.is_required()
            else repr(field.get_default(call_default_factory=True)),
            field.description or meanings.get(name, ""),
        )
        for name, field in model.model_fields.items()
    ]


def _attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= _own_docstrings(cls)
    return found


def _own_docstrings(model: type[BaseModel]) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source: a model created at run time
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
    """Return a type for the author of a config file: ``int or null``, ``'a' or 'b'``."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(inner[0]) + _bounds(m for part in inner[1:] for m in _parts(part))
    if origin in (Union, UnionType):
        return " or ".join(_type_name(a) for a in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"list of {_type_name(inner[0])}"
    if annotation is NoneType:
        return "null"
    return getattr(annotation, "__name__", str(annotation))


def _parts(part: object) -> Iterable[object]:
    """Return the limits in one argument of an ``Annotated``."""
    return getattr(part, "metadata", None) or [part]


def _bounds(metadata: Iterable[object]) -> str:
    """Return the limits as text, such as ``, above 0``."""
    words = [
        f", {word} {getattr(part, name)}"
        for part in metadata
        for name, word in _BOUNDS.items()
        if getattr(part, name, None) is not None
    ]
    return "".join(words)
