"""The fields of a config model as the author of a config file reads them.

Takes: a pydantic model. Gives: name, type, default and meaning of each field. Never: imports a
plugin's class, or knows where the table is shown (`rollart info`, `docs/config.md`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@dataclass(frozen=True, slots=True)
class FieldHelp:
    """One field."""

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
    """Return the string that stands below each field, as the house writes its docs."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= _own_docstrings(cls)
    return found


def _own_docstrings(model: type[BaseModel]) -> dict[str, str]:
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
    """Return the limits in one part of an ``Annotated``."""
    return getattr(part, "metadata", None) or [part]


def _bounds(metadata: Iterable[object]) -> str:
    """Return ``, above 0`` and the like."""
    words = [
        f", {word} {getattr(part, name)}"
        for part in metadata
        for name, word in _BOUNDS.items()
        if getattr(part, name, None) is not None
    ]
    return "".join(words)
