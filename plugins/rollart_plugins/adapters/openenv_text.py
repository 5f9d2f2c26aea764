"""Between text and OpenEnv's JSON: what the policy writes as an action, an observation as text.

Takes: the schemas of a server and the options. Gives: a :class:`Mapper`. Never: talks to a server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from rollart_core.errors import PluginError, did_you_mean
from rollart_plugins.adapters.openenv_client import InvalidAction

_OWN_FIELDS = frozenset({"metadata", "done", "reward"})
"""What OpenEnv's base classes give every action and observation."""


@dataclass(frozen=True, slots=True)
class Mapper:
    """One environment's way with text."""

    action_field: str | None
    """None: the text is a JSON object."""
    action_kind: str
    fixed: Mapping[str, Any]
    """Further fields of every action."""
    field: str | None
    """Path of the observation's field; None where there is a template, or all is shown."""
    template: str | None

    def action(self, text: str) -> dict[str, Any]:
        """Return the action that ``text`` is.

        Raises:
            InvalidAction: When it is none; for the policy to read.
        """
        if self.action_field is None:
            return {**_json_object(text), **self.fixed}
        return {**self.fixed, self.action_field: _converted(text, self.action_kind)}

    def observation(self, answer: Mapping[str, Any]) -> str:
        """Return what the policy reads of an answer.

        Raises:
            ValueError: When the answer lacks what the options name.
        """
        seen = answer.get("observation") or {}
        if self.template is not None:
            try:
                return self.template.format_map(seen)
            except (KeyError, AttributeError, IndexError, ValueError) as e:
                raise ValueError(f"the template does not fit the observation {seen!r}: {e}") from e
        if self.field is not None:
            return _text(_at(seen, self.field))
        return _text({k: v for k, v in seen.items() if k not in _OWN_FIELDS})


def new_mapper(schemas: Mapping[str, Any], options: Mapping[str, Any]) -> Mapper:
    """Return the mapper that options and schemas ask for.

    Raises:
        PluginError: When they leave open what to do, or name what the schema does not have.
    """
    field, kind = _action_field(schemas["action"], options)
    wanted: str | None = options["observation"]
    if wanted is not None and "{" in wanted:
        names = [name for _, name, _, _ in Formatter().parse(wanted) if name]
        for name in names:
            _refuse_unknown(schemas, name.split(".")[0].split("[")[0], "observation")
        return Mapper(field, kind, options["action"], None, wanted)
    if wanted is not None:
        _refuse_unknown(schemas, wanted.split(".")[0], "observation")
    path = wanted or _only_text(schemas.get("observation") or {})
    return Mapper(field, kind, options["action"], path, None)


def _action_field(schema: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str | None, str]:
    known = _fields(schema)
    fixed: Mapping[str, Any] = options["action"]
    for name in fixed:
        _refuse_unknown({"action": schema}, name, "action")
    wanted: str | None = options["action_field"]
    if options["action_json"]:
        if wanted is not None:
            raise PluginError("action_field has no effect with action_json: leave one of them out")
        return None, "object"
    if wanted is not None:
        _refuse_unknown({"action": schema}, wanted, "action_field")
        return wanted, _kind(known.get(wanted, {}))
    open_fields = [n for n in schema.get("required") or known if n in known and n not in fixed]
    if len(open_fields) != 1:
        raise PluginError(
            f"the server's action has the fields {', '.join(known) or 'none'}: action_field says "
            "which one gets the text (action: the values of others; action_json: all of it)"
        )
    return open_fields[0], _kind(known[open_fields[0]])


def _fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {n: s for n, s in (schema.get("properties") or {}).items() if n not in _OWN_FIELDS}


def _refuse_unknown(schemas: Mapping[str, Any], name: str, option: str) -> None:
    schema = schemas.get("action" if option.startswith("action") else "observation") or {}
    hidden = ("done", "reward")  # the server sends them beside the observation, not in it
    known = [name for name in schema.get("properties") or () if name not in hidden]
    if known and name not in known and not schema.get("additionalProperties"):
        near = did_you_mean(name, known)
        raise PluginError(f"{option}: the server has no field {name!r}.{near} It has: {known}")


def _kind(schema: Mapping[str, Any]) -> str:
    kinds = [s.get("type") for s in (schema, *(schema.get("anyOf") or ()))]
    return next((str(kind) for kind in kinds if kind and kind != "null"), "string")


def _only_text(schema: Mapping[str, Any]) -> str | None:
    texts = [name for name, said in _fields(schema).items() if _kind(said) == "string"]
    return texts[0] if len(texts) == 1 else None


def _converted(text: str, kind: str) -> Any:
    try:
        if kind == "integer":
            return int(text)
        if kind == "number" and math.isfinite(float(text)):
            return float(text)
        if kind == "boolean":
            return {"true": True, "false": False}[text.strip().lower()]
        if kind in ("array", "object"):
            return json.loads(text)
        if kind == "string":
            return text
    except (ValueError, KeyError):
        pass
    raise InvalidAction(f"Invalid action: {text[:100]!r} is no {kind}.")


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as e:
        raise InvalidAction(f"Invalid action: it is not JSON ({e}).") from e
    if not isinstance(found, dict):
        raise InvalidAction("Invalid action: it is not a JSON object.")
    return found


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise ValueError(f"the observation has no {path!r}") from e
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
