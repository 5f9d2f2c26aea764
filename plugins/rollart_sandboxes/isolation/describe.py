"""The description of an environment by its sandbox: its spec, and the problems of its options.

Takes: an id, its options, the key ``isolation``. Gives: an ``IsolatedDescription``. Never: trusts a
sandbox more than needed: a spec is built field by field, and only from the types of the contract.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints

from rollart_core.config.problems import Problem
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.sandbox_service import IsolatedDescription
from rollart_core.errors import ConfigError, PluginError, SandboxFailure
from rollart_core.plugins import registry
from rollart_core.rollout import loop
from rollart_sandboxes.isolation import config
from rollart_sandboxes.isolation.env import EnvSlot, json_options
from rollart_sandboxes.isolation.recipe import recipe_of

START_S = 30.0
"""Added to the environment's own reset limit, for a sandbox that has to start."""
_MAX_TEXT = 1000
_ENTRY_POINT = "rollart_sandboxes.isolation.env:IsolatedEnv"


_known: dict[str, IsolatedDescription] = {}


def describe(env_id: str, options: Mapping[str, object]) -> IsolatedDescription:
    """Get the description from a sandbox; it is cached in this process.

    Raises:
        UserError: If the isolation is invalid, or the sandbox does not start or has no such
            environment.
    """
    given, rest = config.split(options)
    isolation = config.checked(given)
    key = json.dumps([env_id, isolation.as_dict(), json_options(rest)], sort_keys=True)
    if key not in _known:
        said = _asked(EnvSlot(recipe_of(isolation, env_id), env_id, rest))
        _known[key] = _read(env_id, said, isolation, rest)
    return _known[key]


def option_faults(env_id: str, options: Mapping[str, object]) -> list[Problem]:
    """Return the problems of the isolation, or else those of the environment's own options.

    Raises:
        UserError: As :func:`describe`.
    """
    faults = config.problems_of(options[config.KEY])
    return faults or describe(env_id, options).problems


def _asked(slot: EnvSlot) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        try:
            return await slot.describe()
        finally:
            await slot.close()

    try:
        return loop.run(ask())
    except SandboxFailure as e:
        raise PluginError(f"isolation: {e}") from e


def _read(
    env_id: str, said: Mapping[str, Any], isolation: config.Isolation, rest: Mapping[str, object]
) -> IsolatedDescription:
    try:
        problems = [Problem(tuple(path), str(why)) for path, why in said.get("problems", ())]
        spec = read_spec(env_id, said.get("spec") or {})
        options = dict(said.get("options") or rest)
    except (TypeError, ValueError) as e:
        raise PluginError(f"{env_id}: its sandbox returned an invalid description: {e}") from e
    if spec.kind != "step":
        raise ConfigError(f"{env_id} runs its own loop: only step environments can be isolated")
    if spec.sandbox is not None:
        raise ConfigError(f"{env_id} starts its own sandboxes ({spec.sandbox}): remove isolation")
    _check_network(spec, isolation)
    return IsolatedDescription(
        spec,
        problems,
        {**options, config.KEY: isolation.as_dict()},
        _text(said.get("distribution", "unregistered")),
        _text(said.get("version", "0")),
    )


def _check_network(spec: EnvSpec, isolation: config.Isolation) -> None:
    """Refuse a sandbox without a network if the environment needs one."""
    model = registry.config_model("sandboxes", isolation.sandbox)
    if not spec.network or model is None or "network" not in model.model_fields:
        return
    if not isolation.options.get("network"):
        raise ConfigError(
            f"{spec.id} needs the network, and its sandbox has none: name the hosts it may reach, "
            f"as in isolation: {{kind: {isolation.kind}, network: ['api.example.org']}}"
        )


def read_spec(env_id: str, said: Mapping[str, Any]) -> EnvSpec:
    """Return the spec that a sandbox sends as plain values; omitted fields have their defaults.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If the spec is invalid.
    """
    given = {k: v for k, v in said.items() if k not in ("id", "entry_point", "config", "alias")}
    spec: EnvSpec = _record(EnvSpec, {**given, "id": env_id, "entry_point": _ENTRY_POINT})
    known = said.get("id")
    if isinstance(known, str) and 0 < len(known) <= _MAX_TEXT:
        spec = replace(spec, id=known)
    if spec.max_turns < 1 or not spec.splits:
        raise ValueError("max_turns and splits must not be empty")
    times = spec.timeouts
    return replace(spec, timeouts=replace(times, reset_s=times.reset_s + START_S))


def _record(cls: type[Any], said: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{n: _value(hints[n], said[n], n) for n in names if n in said})


def _value(hint: Any, value: Any, name: str) -> Any:
    """Return a plain value as the type of a field."""
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _record(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, list):
        kinds = get_args(hint)
        each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(_value(k, v, name) for k, v in zip(each, value, strict=True))
    allowed = get_args(hint) or (hint,)
    if value in [a for a in allowed if isinstance(a, str)]:  # a value of a Literal
        return value
    if float in allowed and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    types = tuple(a for a in allowed if isinstance(a, type))
    right = isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
    if not right:
        raise TypeError(f"{name} is {type(value).__name__}")
    return _text(value) if isinstance(value, str) else value


def _text(value: object) -> str:
    return str(value)[:_MAX_TEXT]
