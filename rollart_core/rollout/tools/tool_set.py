"""The tools of one episode, and validation of their specs and of the arguments of calls.

Takes: tool specs of environments. Gives: :class:`ToolSet`. Never: runs a tool, or fetches the
references of a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollart_core.errors import did_you_mean, first_line
from rollart_core.types import FunctionSpec, ToolSpec

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolSet:
    """Tools by name.

    Args:
        specs: The declared tools.

    Raises:
        ValueError: If a spec or a schema is not valid, or two tools have the same name.
    """

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        self.specs = checked_tools(specs)
        self._validators: dict[str, Validator] = {}
        for spec in self.specs:
            function = spec["function"]
            self._validators[function["name"]] = _validator(function)

    def problem(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return why a call is invalid, in one line for the policy; None if it is valid."""
        from jsonschema.exceptions import best_match

        validator = self._validators.get(name)
        if validator is None:
            known = list(self._validators)
            near = did_you_mean(name, known)
            return f"there is no tool {name!r}; there are: {', '.join(known)}.{near}"
        error = best_match(validator.iter_errors(dict(arguments)))
        if error is None:
            return None
        where = "".join(f"{at}: " for at in error.absolute_path)
        return f"wrong arguments for {name}: {where}{first_line(error.message)}"


def checked_tools(specs: object) -> tuple[ToolSpec, ...]:
    """Return the tools that an environment declared, as plain tool specs.

    Raises:
        ValueError: If a spec is not valid, or two tools have the same name.
    """
    if not isinstance(specs, Sequence) or isinstance(specs, str):
        raise ValueError(f"tools must be a list of tool specs, not {type(specs).__name__}")
    checked = tuple(_checked(spec) for spec in specs)
    names = [spec["function"]["name"] for spec in checked]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two tools have the name {twice[0]!r}")
    return checked


def _checked(spec: object) -> ToolSpec:
    function = spec.get("function") if isinstance(spec, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        shape = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise ValueError(f"a tool must be {shape}, not {first_line(repr(spec), 100)}")
    name = function["name"]
    if not _NAME.fullmatch(name):
        raise ValueError(f"tool name {name!r}: use at most 64 letters, digits, '_', '-' and '.'")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"parameters of tool {name!r} must be a JSON schema")
    try:  # a deep copy as plain JSON, for templates, servers and other processes
        plain = json.loads(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise ValueError(f"parameters of tool {name!r} are not JSON: {e}") from e
    described = str(function.get("description") or "")
    return ToolSpec(
        type="function",
        function=FunctionSpec(name=name, description=described, parameters=plain),
    )


def _validator(function: FunctionSpec) -> Validator:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    schema = function["parameters"]
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as e:
        name = function["name"]
        raise ValueError(
            f"parameters of tool {name!r} are not a JSON schema: {first_line(e.message)}"
        ) from e
    nothing_fetched: Registry[Any] = Registry()
    return kind(schema, registry=nothing_fetched)
