"""Problems of a config: one line each, with the path of the key and a suggestion.

Takes: pydantic's validation errors. Gives: :class:`Problem` records in plain words. Never: raises
them. The loader and the resolver collect all of them first.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollart_core.config.base import Section
from rollart_core.errors import did_you_mean, first_line

Models = tuple[type[BaseModel], ...]

_TRUNCATION = "training needs logprobs of the policy, which truncated sampling does not give"
_PENALTY = "training needs samples of the policy, and penalties change the sampled distribution"
REFUSED = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "typical_p"), _TRUNCATION),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _PENALTY),
}
"""Sampling options of other tools, and why RollArt rejects them."""

_LISTS = frozenset({"tuple_type", "list_type"})
_WANTED = {
    **dict.fromkeys(_LISTS, "must be a list"),
    "string_too_long": "is too long: a name has at most 100 characters",
    **dict.fromkeys(("model_type", "dict_type"), "must be a section of keys"),
}
"""Replacements for messages of pydantic that mention Python types."""
_MOST_NAMED = 3
_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_LIMITS |= {"multiple_of": "a multiple of"}
_OUT_OF_RANGE = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
    | {"multiple_of", "finite_number", "int_parsing_size"}
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a config."""

    path: tuple[str | int, ...]
    """Keys and list indices from the top of the file; empty for the file as a whole."""
    message: str

    @property
    def key(self) -> str:
        """The path as a dotted key."""
        return ".".join(map(str, self.path))

    def under(self, *prefix: str | int) -> Problem:
        """Return the same problem for a section at ``prefix``."""
        return Problem((*prefix, *self.path), self.message)

    def within(self) -> str:
        """Return ``key: message``."""
        return f"{self.key}: {self.message}" if self.path else self.message


def of_validation(
    error: ValidationError, model: type[BaseModel], others: Models = ()
) -> list[Problem]:
    """Convert pydantic's errors to problems.

    Args:
        error: The error that ``model`` raised.
        model: The validated model.
        others: Alternatives of the model. A key that only they have "has no effect" here.
    """
    return [_problem(details, model, others) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, model: type[BaseModel], others: Models) -> Problem:
    path, models, alternatives = _walk(details["loc"], (model,), others)
    kind = details["type"]
    if kind == "extra_forbidden":
        return Problem(path, unknown_key(str(path[-1]), models, alternatives))
    if kind == "missing":
        fields = [m.model_fields[k] for m in models if (k := str(path[-1])) in m.model_fields]
        meaning = next((f.description for f in fields if f.description), None)
        return Problem(path, f"is missing ({meaning})" if meaning else "is missing")
    message = details["msg"]
    if kind in {"value_error", "assertion_error"}:
        return Problem(path, message.split(", ", 1)[-1])
    given = first_line(repr(details.get("input")), limit=60)
    if kind in _LISTS and isinstance(details.get("input"), str):
        return Problem(path, f"must be a list, such as [{details['input']}]")
    message = _WANTED.get(kind) or message.replace("Input should be", "must be", 1)
    if kind in _OUT_OF_RANGE:
        message = _range(path, models) or message
    return Problem(path, f"{message}, got {given}")


def _range(path: Sequence[str | int], models: Models) -> str:
    """Return the whole range of a number and its default, or an empty string if it is unknown."""
    name = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    for field in (model.model_fields[name] for model in models if name in model.model_fields):
        limits = dict(_limits([*field.metadata, field.annotation]))
        words = [
            f"{word} {_spelled(limits[key])}" for key, word in _LIMITS.items() if key in limits
        ]
        if not words:
            continue
        default = field.default
        is_number = isinstance(default, int | float) and name == path[-1]
        usual = f" (the default is {_spelled(default)})" if is_number else ""
        return f"must be {' and '.join(words)}{usual}"
    return ""


def _spelled(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _limits(parts: Iterable[Any]) -> Iterable[tuple[str, float]]:
    """Yield the limits in annotations and in the other arguments of ``Annotated``."""
    for part in parts:
        inner = [*typing.get_args(part), *getattr(part, "metadata", ())]
        yield from (
            (key, value) for key in _LIMITS if (value := getattr(part, key, None)) is not None
        )
        if typing.get_origin(part) is not typing.Literal:
            yield from _limits(inner)


def unknown_key(name: str, models: Models, alternatives: Models = ()) -> str:
    """Return why ``models`` reject ``name``: it belongs to an alternative, or to no model."""
    for other in alternatives:
        if name in other.model_fields:
            here = " or ".join(_case(m) for m in models)
            return f"has no effect with {here}; it belongs to {_case(other)}"
    if name in REFUSED:
        return f"is refused: {REFUSED[name]}; use rollout.temperature"
    inner = [f"{section}.{name}" for section in _sections_with(name, models)]
    if 0 < len(inner) <= _MOST_NAMED:
        return f"unknown key. Did you mean {' or '.join(map(repr, inner))}?"
    known = [n for m in models for n in m.model_fields]
    near = did_you_mean(name, known)
    return f"unknown key.{near}" if near else f"unknown key. Known here: {', '.join(known)}"


def _sections_with(name: str, models: Models) -> list[str]:
    """Return the sections at the same level that have this key."""
    return [
        field
        for model in models
        for field, info in model.model_fields.items()
        if any(name in inner.model_fields for inner in _sections_in(info.annotation))
    ]


def _case(model: type[BaseModel]) -> str:
    """Return how a config file selects this model among its alternatives."""
    return getattr(model, "case", "") or model.__name__


def _walk(
    loc: Sequence[str | int], models: Models, others: Models
) -> tuple[tuple[str | int, ...], Models, Models]:
    """Follow ``loc`` down the models, without the union tags that pydantic inserts.

    Returns:
        The path as in the file, the models that have its last key, and their alternatives.
    """
    path: list[str | int] = []
    holders, alternatives = models, others
    for position, part in enumerate(loc):
        tagged = tuple(m for m in models if m.__name__ == part)
        if tagged and position:
            others = tuple(m for m in models if m not in tagged)
            models = tagged
            continue
        path.append(part)
        holders, alternatives = models, others
        if isinstance(part, str):
            models = tuple(
                found
                for m in models
                if part in m.model_fields
                for found in _models_in(m.model_fields[part].annotation)
            )
            others = ()
    return tuple(path), holders, alternatives


def _sections_in(annotation: Any) -> Iterable[type[BaseModel]]:
    """Yield the sections in an annotation, except those in a list and plugins."""
    if typing.get_origin(annotation) not in (tuple, list, dict):
        for inner in typing.get_args(annotation) or (annotation,):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield inner


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    """Yield the models in an annotation: ``Model``, ``A | B``, ``tuple[Model, ...]``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)
