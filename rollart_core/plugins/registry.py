"""From an id to a class: lazily, per kind, in whichever process asks.

Takes: an id (``webshop/WebShop-v1``), an alias (``webshop``), ``module:Class`` for code that no
plugin registers, or ``ADAPTER::FOREIGN_ID`` for an environment of another kind. Gives: its spec,
its class, its checked options, or a built object. Never: keeps a table of its own (each process
reads its own entry points), or imports a class before it is asked.

A plugin class takes the fields of its config model as keyword arguments: ``Env(**options)``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ValidationError

from rollart_core.config.problems import Problem, of_validation
from rollart_core.contracts.adapter import SEPARATOR, EnvAdapter, EnvAdapterSpec, split_id
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.sandbox_service import SandboxService
from rollart_core.contracts.spec import PLUGIN_API, PluginSpec
from rollart_core.errors import (
    ConfigError,
    PluginError,
    UnknownIdError,
    UserError,
    did_you_mean,
    first_line,
)
from rollart_core.plugins import api_version as plugin_api
from rollart_core.plugins.manager import CORE, KINDS, Plugin, Registered, plugins

if TYPE_CHECKING:
    from rollart_core.contracts.env import TextEnv

SINGULAR = {kind: re.sub(r"(?<=[xs])es$|s$", "", kind).replace("_", " ") for kind in KINDS}
"""Kind -> one of it, in words: ``hardware_mappers`` -> ``hardware mapper``."""

ISOLATION = "isolation"
"""The option of every environment that says in which box it lives; the core's, not its own."""

_CONTRACTS = "rollart_core.contracts"
_KIND_OF_BASE = {
    f"{_CONTRACTS}.reward.Reward": "rewards",
    f"{_CONTRACTS}.reward.GroupReward": "rewards",
    f"{_CONTRACTS}.algorithm.Algorithm": "algorithms",
    f"{_CONTRACTS}.hardware.HardwareMapper": "hardware_mappers",
    f"{_CONTRACTS}.inference.InferenceEngine": "inference_engines",
    f"{_CONTRACTS}.sandbox.Sandbox": "sandboxes",
    f"{_CONTRACTS}.reward.RewardBackend": "reward_backends",
    f"{_CONTRACTS}.weights.WeightChannel": "weight_channels",
    f"{_CONTRACTS}.tracker.Tracker": "trackers",
    f"{_CONTRACTS}.sandbox_service.SandboxService": "sandbox_services",
    "rollart_core.runtime.workers.WorkersRuntime": "runtimes",
    "rollart_core.training.policy.Policy": "forward_passes",
}
"""The base of the classes of a kind, by name: most are never imported in this process."""

_BUILT_FROM_OPTIONS = frozenset({"environments", "rewards"})
"""Kinds whose classes get nothing but their options, so that a missing one can be told early."""


def find(kind: str, plugin_id: str) -> Registered:
    """Return who registers ``plugin_id``, which may be an alias or ``module:Class``.

    Of ``ADAPTER::FOREIGN_ID`` only the adapter is looked at; :func:`env_spec` asks it.

    Raises:
        UnknownIdError: When no plugin has it; names the nearest that exists.
        PluginError: When the plugin that has it is broken; says why.
    """
    if kind == "environments" and split_id(plugin_id):
        return _adapted(plugin_id)
    known = plugins().registered(kind)
    if plugin_id in known:
        return known[plugin_id]
    for registered in known.values():
        if getattr(registered.spec, "alias", None) == plugin_id:
            return registered
    if ":" in plugin_id:
        return _unregistered(kind, plugin_id)
    raise _not_found(kind, plugin_id)


def names(kind: str) -> list[str]:
    """Return every id and alias of a kind that can be used."""
    known = plugins().registered(kind)
    return [*known, *(a for r in known.values() if (a := getattr(r.spec, "alias", None)))]


def spec(kind: str, plugin_id: str) -> PluginSpec:
    """Return the spec of an id, alias or ``module:Class`` (a default one, for the last).

    Raises:
        UserError: As :func:`find`.
    """
    return cast("PluginSpec", find(kind, plugin_id).spec)


def env_spec(plugin_id: str, options: Mapping[str, object] | None = None) -> EnvSpec:
    """Return the spec of an environment; of a foreign one, what its adapter says of it.

    Of one with the option ``isolation`` its box is asked: it need not be installed here.

    Args:
        plugin_id: Id, alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``.
        options: Its options, which may change what an adapter says (its splits, for one).

    Raises:
        UserError: As :func:`find` and :func:`checked_options`; and what the adapter raises.
    """
    if _isolated("environments", options or {}):
        return sandbox_service().describe(plugin_id, options or {}).spec
    found = cast("EnvSpec", spec("environments", plugin_id))
    parts = split_id(plugin_id)
    if parts is None:
        return found
    checked = checked_options("environments", plugin_id, options or {})
    said = _adapter(parts[0]).spec(parts[1], checked)
    return replace(said, id=found.id, entry_point=found.entry_point, config=found.config)


def resolve(kind: str, plugin_id: str) -> type[Any]:
    """Import and return the class behind an id, alias or ``module:Class``.

    Behind ``ADAPTER::FOREIGN_ID`` stands the class of the adapter.

    Raises:
        UserError: As :func:`find`; and PluginError when its class cannot be imported.
    """
    registered = find(kind, plugin_id)
    found = cast("type[Any]", load_object(registered.spec.entry_point, registered.key))
    if not isinstance(registered.spec, PluginSpec):
        return found
    return plugin_api.usable(registered.spec, found)


def config_model(kind: str, plugin_id: str) -> type[BaseModel] | None:
    """Return the pydantic model of a plugin's options; None when it declares none."""
    path = spec(kind, plugin_id).config
    if path is None:
        return None
    model = load_object(path, plugin_id)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginError(f"{plugin_id}: its config {path!r} is not a pydantic model")
    return model


def option_problems(kind: str, plugin_id: str, options: Mapping[str, object]) -> list[Problem]:
    """Return what is wrong with the options of a plugin; an empty list when nothing is."""
    if _isolated(kind, options):
        return sandbox_service().option_problems(plugin_id, options)
    model = config_model(kind, plugin_id)
    if model is None and kind == "environments" and split_id(plugin_id):
        return []  # the adapter says nothing of its options, and its class is not the environment
    if model is None:
        asked = options or ":" in plugin_id
        return _signature_problems(kind, plugin_id, options) if asked else []
    try:
        model(**options)
    except ValidationError as e:
        return of_validation(e, model)
    except Exception as e:  # a validator may raise more than pydantic turns into its own error
        return [Problem((), f"{type(e).__name__}: {first_line(str(e))}")]
    return []


def checked_options(kind: str, plugin_id: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options, checked, converted and filled with defaults by the config model.

    Raises:
        ConfigError: Naming every option that is unknown or wrong.
        UserError: As :func:`find`.
    """
    problems = option_problems(kind, plugin_id, options)
    if problems:
        lines = [f"{plugin_id}: {problem.within()}" for problem in problems]
        raise ConfigError("\n".join(lines))
    if _isolated(kind, options):
        return dict(sandbox_service().describe(plugin_id, options).options)
    model = config_model(kind, plugin_id)
    return dict(options) if model is None else model(**options).model_dump()


def build(
    kind: str, plugin_id: str, options: Mapping[str, object] | None = None, **context: object
) -> Any:
    """Build an object: its class called with its checked options and ``context``.

    Args:
        kind: Such as ``"trackers"``.
        plugin_id: Id, alias or ``module:Class``.
        options: The plugin's own options, as a config file gives them.
        context: What the caller brings, such as a weight channel's ``location``; unchecked.

    Raises:
        UserError: As :func:`checked_options` and :func:`resolve`.
    """
    if _isolated(kind, options or {}):
        return sandbox_service().make(plugin_id, options or {})
    checked = checked_options(kind, plugin_id, options or {})
    parts = split_id(plugin_id) if kind == "environments" else None
    if parts:
        return _adapter(parts[0]).make(parts[1], checked)
    return resolve(kind, plugin_id)(**checked, **context)


def make(env_id: str, /, **options: object) -> TextEnv:
    """Make an environment by id, alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``.

    Args:
        env_id: Such as ``"webshop/WebShop-v1"`` or ``"gymnasium::Taxi-v3"``.
        options: The environment's own options.

    Raises:
        UserError: When there is no such environment, or an option is unknown or wrong.
    """
    return cast("TextEnv", build("environments", env_id, options))


def sandbox_service() -> SandboxService:
    """Return the sandbox service of this process: ours, unless a plugin brings another one.

    Raises:
        PluginError: When there is none, or two plugins bring one, or it cannot be imported.
    """
    known = others_first("sandbox_services")
    if not known:
        raise PluginError("no sandbox service is installed, see `rollart list`")
    first, *rest = (registered.plugin for registered in known)
    if rest and rest[0].distribution != CORE:
        raise PluginError(
            f"one sandbox service can be used, and {first} and {rest[0]} bring one: uninstall one"
        )
    made: object = resolve("sandbox_services", known[0].key)()
    if not isinstance(made, SandboxService):
        raise PluginError(f"sandbox service {known[0].key!r} is a {type(made).__name__}")
    return made


def others_first(kind: str) -> list[Registered]:
    """Return what is registered of a kind, in the order in which it is tried: ours last."""
    found = plugins().registered(kind).values()
    return sorted(found, key=lambda registered: registered.plugin.distribution == CORE)


def kind_of(path: str) -> str:
    """Return the kind of ``module:Class``: that of the base it has, or environments.

    ``agents`` for the class of an agent environment.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        for base in inspect.getmro(found):
            if kind := _KIND_OF_BASE.get(f"{base.__module__}.{base.__qualname__}"):
                return kind
        if all(callable(getattr(found, name, None)) for name in ("prepare", "run", "finish")):
            return "agents"
    except Exception:
        return "environments"  # whose check will say what is wrong
    return "environments"


def load_object(path: str, who: str) -> object:
    """Import ``module:attribute``.

    Raises:
        PluginError: Saying for whom it failed, and why.
    """
    module, _, attribute = path.partition(":")
    try:
        found: object = importlib.import_module(module)
    except (Exception, SystemExit) as e:
        raise PluginError(_import_reason(module, who, e)) from e
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [n for n in dir(found) if not n.startswith("_")])
            raise PluginError(f"{who}: module {module!r} has no {part!r}.{near}")
        found = getattr(found, part)
    return found


def _isolated(kind: str, options: Mapping[str, object]) -> bool:
    return kind == "environments" and ISOLATION in options


def _import_reason(module: str, who: str, error: BaseException) -> str:
    reason = f"{who}: cannot import {module!r}: {type(error).__name__}: {first_line(str(error))}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing in {"torch", "transformers", "tokenizers", "safetensors", "tensorboardX", "jinja2"}:
        reason += " (pip install 'rollart[train]' brings it)"
    elif missing and f"{module}.".startswith(f"{missing}."):
        reason += f" (install {missing}, or put its folder on PYTHONPATH)"
    return reason


def _unregistered(kind: str, path: str) -> Registered:
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise UnknownIdError(f"{path!r} is neither an id nor 'module:Class'")
    spec_class = KINDS[kind]
    made = spec_class(id=path, entry_point=path)  # type: ignore[call-arg]
    if isinstance(made, PluginSpec):
        made = replace(made, contract_version=PLUGIN_API)
    return Registered(kind, made, Plugin(path, module, "unregistered", "0"))


def _adapted(env_id: str) -> Registered:
    """Return a bare spec of a foreign environment, from its adapter's."""
    name, foreign = split_id(env_id) or ("", "")
    if not name or not foreign:
        raise UnknownIdError(f"{env_id!r} is not of the form 'ADAPTER::FOREIGN_ID'")
    adapter = find("env_adapters", name)
    said = cast("EnvAdapterSpec", adapter.spec)
    made = EnvSpec(
        id=f"{said.alias or said.id}{SEPARATOR}{foreign}",
        entry_point=said.entry_point,
        config=said.config,
        summary=f"{foreign}, through the adapter {said.id}.",
        kind=said.kind,
    )
    return Registered("environments", made, adapter.plugin)


def _adapter(name: str) -> EnvAdapter:
    made: object = resolve("env_adapters", name)()
    if not isinstance(made, EnvAdapter):
        raise PluginError(f"env adapter {name!r} is a {type(made).__name__}, not an EnvAdapter")
    return made


def _not_found(kind: str, plugin_id: str) -> UserError:
    for registered in plugins().broken_specs:
        aliases = {registered.key, getattr(registered.spec, "alias", None)}
        if registered.kind == kind and plugin_id in aliases:
            plugin = registered.plugin
            return PluginError(
                f"{plugin_id!r} is of plugin {plugin}, which is broken: {plugin.broken}"
            )
    near = did_you_mean(plugin_id, names(kind))
    message = f"no {SINGULAR[kind]} {plugin_id!r} is installed.{near}"
    broken = plugins().broken
    if broken:
        message += (
            f" ({len(broken)} broken: {', '.join(p.name for p in broken)}; see `rollart list`)"
        )
    return UnknownIdError(message + f" `rollart list {kind}` shows what there is.")


def _signature_problems(kind: str, plugin_id: str, options: Mapping[str, object]) -> list[Problem]:
    parameters = inspect.signature(resolve(kind, plugin_id)).parameters.values()
    fields = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = [p.name for p in fields]
    problems = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        unknown = [name for name in options if name not in known]
        problems = [Problem((n,), f"unknown key.{did_you_mean(n, known)}") for n in unknown]
    if kind in _BUILT_FROM_OPTIONS:
        needed = [p.name for p in fields if p.default is p.empty and p.name not in options]
        problems += [Problem((name,), "is missing") for name in needed]
    return problems
