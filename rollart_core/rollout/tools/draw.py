"""Generated tool calls, with random arguments or with edge values of the schemas.

Takes: tool specs. Gives: :class:`~rollart_core.rollout.tools.action.Call` records whose arguments
are valid under the schemas, as in a run. Never: makes a call.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from rollart_core.rollout.tools.action import Call
from rollart_core.rollout.tools.tool_set import ToolSet
from rollart_core.types import FunctionSpec, ToolSpec

_EDGES: Final[Mapping[str, Sequence[object]]] = {
    "string": ("ok", "", " \n", "é雪😀", "0", "../..", "x" * 10_000),
    "integer": (1, 0, -1, 100_000),
    "number": (1.5, 0.0, -1.0, 1e9),
    "boolean": (True, False),
    "array": ([],),
    "object": ({},),
    "null": (None,),
}
"""Edge values by JSON type; the first value of each type is a plain one."""
_MAX_DEPTH: Final = 4
_MAX_SIZE: Final = 100_000
"""Maximum ``minItems`` or ``minLength`` that is filled."""

Word = Callable[[], str]
"""Returns a random text."""


def drawn_call(rng: random.Random, tools: Sequence[ToolSpec], word: Word) -> Call:
    """Return a call of a random tool, with random arguments that follow its schema.

    Args:
        rng: The random generator.
        tools: The tools; at least one.
        word: Returns random texts.
    """
    function = rng.choice(list(tools))["function"]
    schema = _Schema(function.get("parameters") or {})
    arguments = {name: _drawn(rng, schema.at(part), word) for name, part in schema.properties()}
    return Call(function["name"], arguments)


def edge_calls(tools: Sequence[ToolSpec]) -> list[Call]:
    """Return calls of every tool, alternating, in which each argument takes each edge value.

    Edge values are 0, -1, the minimum and the maximum, empty and long texts, and every value of an
    ``enum``; one call leaves out the optional arguments. Calls that are invalid under their schema
    are not included, because a run answers them without the environment.

    Raises:
        ValueError: If a spec is not a valid tool.
    """
    known = ToolSet(tools)
    of_each = [_fitting_calls(known, spec["function"]) for spec in known.specs]
    return [call for nth in zip_longest(*of_each) for call in nth if call is not None]


def _fitting_calls(known: ToolSet, function: FunctionSpec) -> list[Call]:
    found: list[Call] = []
    for arguments in _edge_arguments(_Schema(function["parameters"])):
        call = Call(function["name"], arguments)
        if call not in found and known.problem(call.name, arguments) is None:
            found.append(call)
    return found


class _Schema:
    """A JSON schema with its local references resolved."""

    def __init__(self, schema: Any, root: Any = None, depth: int = 0) -> None:
        self.root = schema if root is None else root
        self.depth = depth
        self.said: Mapping[str, Any] = self._followed(schema)

    def at(self, part: Any) -> _Schema:
        """Return a schema nested in this one."""
        return _Schema(part, self.root, self.depth + 1)

    def properties(self) -> list[tuple[str, Any]]:
        """Return names and schemas of an object's properties; none beyond the maximum depth."""
        given = self.said.get("properties")
        return list(given.items()) if isinstance(given, Mapping) and self.depth < _MAX_DEPTH else []

    def required(self) -> Sequence[str]:
        """Return the required properties."""
        given = self.said.get("required")
        return given if isinstance(given, list) else ()

    def alternatives(self) -> list[_Schema]:
        """Return the alternative schemas; only this schema if it has no alternatives."""
        kind = self.said.get("type")
        if isinstance(kind, list):
            return [self.at({**self.said, "type": one}) for one in kind]
        some = self.said.get("anyOf") or self.said.get("oneOf")
        if not isinstance(some, list) or self.depth >= _MAX_DEPTH:
            return [self]
        return [inner for part in some for inner in self.at(part).alternatives()]

    def kind(self) -> str:
        """Return the JSON type of the schema."""
        kind = self.said.get("type")
        if isinstance(kind, str):
            return kind
        return "object" if "properties" in self.said else "string"

    def chosen(self) -> Sequence[object]:
        """Return the values of ``const`` or ``enum``; empty if there are none."""
        if "const" in self.said:
            return (self.said["const"],)
        given = self.said.get("enum")
        return given if isinstance(given, list) else ()

    def bound(self, key: str) -> float | None:
        """Return the number of a key; None if there is none."""
        given = self.said.get(key)
        return given if isinstance(given, int | float) and not isinstance(given, bool) else None

    def least(self, key: str) -> int:
        """Return the minimum size of a key, at most ``_MAX_SIZE``."""
        return min(int(self.bound(key) or 0), _MAX_SIZE)

    def _followed(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            schema = self.root
            for key in reference[2:].split("/"):
                schema = schema.get(key) if isinstance(schema, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}


def _drawn(rng: random.Random, schema: _Schema, word: Word) -> Any:
    if schema.chosen():
        return rng.choice(list(schema.chosen()))
    schema = rng.choice(schema.alternatives())
    if schema.chosen():
        return rng.choice(list(schema.chosen()))
    kind = schema.kind()
    if kind in ("integer", "number"):
        low, high = _range(schema)
        if low > high:  # the bounds contain no whole number
            return schema.bound("minimum") or schema.bound("maximum") or (low + high) / 2
        return rng.randint(low, high)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        items = schema.at(schema.said.get("items"))
        size = max(1, schema.least("minItems")) if schema.depth < _MAX_DEPTH else 0
        return [_drawn(rng, items, word) for _ in range(size)]
    if kind == "object":
        return {name: _drawn(rng, schema.at(part), word) for name, part in schema.properties()}
    return None if kind == "null" else word()


def _range(schema: _Schema) -> tuple[int, int]:
    """Return the range of whole numbers to draw from; it may be empty, with the first larger."""
    low, high = _bounds(schema)
    if low is None:
        low = 0 if high is None or high >= 0 else high - 100
    return low, low + 100 if high is None else high


def _bounds(schema: _Schema) -> tuple[int | None, int | None]:
    """Return the smallest and the largest whole number that a schema allows; None: no bound."""
    low, above = schema.bound("minimum"), schema.bound("exclusiveMinimum")
    high, below = schema.bound("maximum"), schema.bound("exclusiveMaximum")
    lows = [math.ceil(low)] if low is not None else []
    lows += [math.floor(above) + 1] if above is not None else []
    highs = [math.floor(high)] if high is not None else []
    highs += [math.ceil(below) - 1] if below is not None else []
    return max(lows, default=None), min(highs, default=None)


def _edge_arguments(schema: _Schema) -> Iterator[dict[str, Any]]:
    """Yield plain arguments, only the required ones, and each argument with each edge value."""
    edges = {name: list(_edges(schema.at(part))) for name, part in schema.properties()}
    plain = {name: values[0] for name, values in edges.items() if values}
    yield plain
    yield {name: value for name, value in plain.items() if name in schema.required()}
    for name, values in edges.items():
        for value in values[1:]:
            yield {**plain, name: value}


def _edges(schema: _Schema) -> Iterator[Any]:
    if schema.chosen():
        yield from schema.chosen()
        return
    alternatives = schema.alternatives()
    if alternatives != [schema]:
        for one in alternatives:
            yield from _edges(one)
        return
    kind = schema.kind()
    if kind in ("integer", "number"):
        yield from (bound for bound in _bounds(schema) if bound is not None)
    if kind == "number":
        exact = (schema.bound(key) for key in ("minimum", "maximum"))
        yield from (bound for bound in exact if bound is not None)
    if kind == "array" and schema.depth < _MAX_DEPTH:
        size = max(1, schema.least("minItems"))
        yield from ([value] * size for value in _edges(schema.at(schema.said.get("items"))))
    if kind == "object" and schema.depth < _MAX_DEPTH:
        yield from _edge_arguments(schema)
    if kind == "string" and schema.least("minLength"):
        yield "x" * schema.least("minLength")
    yield from _EDGES.get(kind, ())
