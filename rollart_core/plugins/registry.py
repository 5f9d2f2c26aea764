"""Lookup of plugin classes by id: lazy, per kind, in every process.

Takes: an id (``webshop/WebShop-v1``), an alias (``webshop``), ``module:Class`` for code that no
plugin registers, or ``ADAPTER::FOREIGN_ID`` for an environment of another library. Gives: its spec,
its class, its validated options, or a built object. Never: stores a table (each process reads its
entry points), or imports a class before its first use.

A plugin class takes the fields of its config model as keyword arguments: ``Env(**options)``.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ValidationError

from rollart_core.config.problems import Problem, of_validation
from rollart_core.contracts.adapter import SEPARATOR, EnvAdapter, EnvAdapterSpec, split_id
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import GroupReward, RewardSpec
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
"""Kind -> its singular in words: ``hardware_mappers`` -> ``hardware mapper``."""

ISOLATION = "isolation"
"""The option of every environment that selects its sandbox. The core handles it, not the
environment."""

FUNCTION = "function"
"""Alias of the reward that calls a plain function, which ``module:function`` names."""

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
    f"{_CONTRACTS}.tool_format.ToolFormat": "tool_formats",
    "rollart_core.runtime.workers.WorkersRuntime": "runtimes",
    "rollart_core.training.policy.Policy": "forward_passes",
}
"""Kind -> the name of the base class. Most are never imported in this process."""

_BUILT_FROM_OPTIONS = frozenset({"environments", "rewards"})
"""Kinds whose classes receive only their options, so that a missing option can be reported
early."""


def find(kind: str, plugin_id: str) -> Registered:
    """Return the registration of ``plugin_id``, which may be an alias or ``module:Class``.

    For ``ADAPTER::FOREIGN_ID``, only the adapter is looked up. :func:`env_spec` calls it.

    Raises:
        UnknownIdError: If no plugin has it. The message suggests the nearest id.
        PluginError: If its plugin is broken. The message has the reason.
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
    """Return every usable id and alias of a kind."""
    known = plugins().registered(kind)
    return [*known, *(a for r in known.values() if (a := getattr(r.spec, "alias", None)))]


def spec(kind: str, plugin_id: str) -> PluginSpec:
    """Return the spec of an id, alias or ``module:Class`` (for the last, a default spec).

    An unregistered reward declares the fields of its spec as attributes of its class.

    Raises:
        UserError: As :func:`find`, and for an unregistered reward as :func:`resolve`.
    """
    found = cast("PluginSpec", find(kind, plugin_id).spec)
    return _as_its_class_says(found) if isinstance(found, RewardSpec) and ":" in found.id else found


def _as_its_class_says(spec: RewardSpec) -> RewardSpec:
    cls = resolve("rewards", spec.id)
    said = {n: getattr(cls, n, getattr(spec, n)) for n in ("stateless", "runs_on", "reward_range")}
    return replace(spec, group=issubclass(cls, GroupReward), **said)


def env_spec(plugin_id: str, options: Mapping[str, object] | None = None) -> EnvSpec:
    """Return the spec of an environment. For a foreign environment, call its adapter.

    With the option ``isolation``, the sandbox returns the spec. The environment need not be
    installed here.

    Args:
        plugin_id: Id, alias, ``module:Class`` or ``ADAPTER::FOREIGN_ID``.
        options: Its options, which may change the spec from an adapter (its splits, for example).

    Raises:
        UserError: As :func:`find` and :func:`checked_options`, or from the adapter.
    """
    if _isolated("environments", options or {}):
        return sandbox_service().describe(plugin_id, options or {}).spec
    found = cast("EnvSpec", spec("environments", plugin_id))
    parts = split_id(plugin_id)
    if parts is None:
        return _with_tools(found) if ":" in plugin_id else found
    checked = checked_options("environments", plugin_id, options or {})
    said = _adapter(parts[0]).spec(parts[1], checked)
    return replace(said, id=found.id, entry_point=found.entry_point, config=found.config)


def _with_tools(spec: EnvSpec) -> EnvSpec:
    """Return the spec of an unregistered class, which has tools if it says so or is a ToolEnv."""
    tools = getattr(resolve("environments", spec.id), "tools", False)
    return replace(spec, tools=tools is True or callable(tools))


def resolve(kind: str, plugin_id: str) -> type[Any]:
    """Import and return the class behind an id, alias or ``module:Class``.

    For ``ADAPTER::FOREIGN_ID``, this is the class of the adapter.

    Raises:
        UserError: As :func:`find`, or PluginError if the class cannot be imported.
    """
    registered = find(kind, plugin_id)
    found = cast("type[Any]", load_object(registered.spec.entry_point, registered.key))
    if kind == "rewards" and inspect.isroutine(found):
        return cast("type[Any]", resolve(kind, FUNCTION).of(plugin_id))
    if not isinstance(registered.spec, PluginSpec):
        return found
    return plugin_api.usable(registered.spec, found)


def config_model(kind: str, plugin_id: str) -> type[BaseModel] | None:
    """Return the pydantic model of a plugin's options. None if it declares none."""
    path = spec(kind, plugin_id).config
    if path is None:
        return None
    model = load_object(path, plugin_id)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginError(f"{plugin_id}: its config {path!r} is not a pydantic model")
    return model


def option_problems(kind: str, plugin_id: str, options: Mapping[str, object]) -> list[Problem]:
    """Return the problems of a plugin's options. Empty if they are valid."""
    if _isolated(kind, options):
        return sandbox_service().option_problems(plugin_id, options)
    model = config_model(kind, plugin_id)
    if model is None and kind == "environments" and split_id(plugin_id):
        return []  # the adapter declares no options, and its class is not the environment
    if model is None:
        asked = options or ":" in plugin_id
        return _signature_problems(kind, plugin_id, options) if asked else []
    try:
        model(**options)
    except ValidationError as e:
        return of_validation(e, model)
    except Exception as e:  # a validator may raise errors that pydantic does not convert
        return [Problem((), f"{type(e).__name__}: {first_line(str(e))}")]
    return []


def checked_options(kind: str, plugin_id: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options, validated, converted and filled with defaults by the config model.

    Raises:
        ConfigError: If options are unknown or invalid. The message names all of them.
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
    """Build an object: call its class with its validated options and ``context``.

    Args:
        kind: Such as ``"trackers"``.
        plugin_id: Id, alias or ``module:Class``.
        options: The plugin's options, as in a config file.
        context: Further arguments from the caller, such as a weight channel's ``location``. Not
            validated.

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
        options: Options of the environment.

    Raises:
        UserError: If there is no such environment, or an option is unknown or invalid.
    """
    return cast("TextEnv", build("environments", env_id, options))


def sandbox_service() -> SandboxService:
    """Return the sandbox service of this process: RollArt's, unless a plugin provides another.

    Raises:
        PluginError: If there is none, two plugins provide one, or it cannot be imported.
    """
    known = others_first("sandbox_services")
    if not known:
        raise PluginError("no sandbox service is installed, see `rollart list`")
    first, *rest = (registered.plugin for registered in known)
    if rest and rest[0].distribution != CORE:
        raise PluginError(f"{first} and {rest[0]} both provide a sandbox service: uninstall one")
    made: object = resolve("sandbox_services", known[0].key)()
    if not isinstance(made, SandboxService):
        raise PluginError(f"sandbox service {known[0].key!r} is a {type(made).__name__}")
    return made


def others_first(kind: str) -> list[Registered]:
    """Return the registrations of a kind in the order of use: RollArt's last."""
    found = plugins().registered(kind).values()
    return sorted(found, key=lambda registered: registered.plugin.distribution == CORE)


def kind_of(path: str) -> str:
    """Return the kind of ``module:Class``: that of its base class, or environments.

    For the class of an agent environment, return ``agents``; for a function, ``rewards``.
    """
    module, _, name = path.partition(":")
    _find_in_current_folder(module.partition(".")[0])
    try:
        found = getattr(importlib.import_module(module), name)
        if inspect.isroutine(found):
            return "rewards"
        for base in inspect.getmro(found):
            if kind := _KIND_OF_BASE.get(f"{base.__module__}.{base.__qualname__}"):
                return kind
        if all(callable(getattr(found, name, None)) for name in ("prepare", "run", "finish")):
            return "agents"
    except Exception:
        return "environments"  # the check of environments reports the problem
    return "environments"


def load_object(path: str, who: str) -> object:
    """Import ``module:attribute``.

    Raises:
        PluginError: If the import fails. The message names the plugin and the reason.
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
        reason += " (run: pip install 'rollart[train]')"
    elif missing and f"{module}.".startswith(f"{missing}."):
        reason += f" (install {missing}, or put its folder on PYTHONPATH)"
    return reason


def _unregistered(kind: str, path: str) -> Registered:
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise UnknownIdError(f"{path!r} is neither an id nor 'module:Class'")
    _find_in_current_folder(module.partition(".")[0])
    spec_class = KINDS[kind]
    made = spec_class(id=path, entry_point=path)  # type: ignore[call-arg]
    if isinstance(made, PluginSpec):
        made = replace(made, contract_version=PLUGIN_API)
    return Registered(kind, made, Plugin(path, module, "unregistered", "0"))


def _find_in_current_folder(package: str) -> None:
    """Make a file or folder of the current folder importable, unless the name is taken."""
    folder = Path.cwd()
    is_here = (folder / f"{package}.py").is_file() or (folder / package).is_dir()
    if is_here and package not in sys.modules and not importlib.util.find_spec(package):
        sys.path.append(str(folder))  # worker processes get the same path


def _adapted(env_id: str) -> Registered:
    """Return a minimal spec of a foreign environment, from the spec of its adapter."""
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
            return PluginError(f"{plugin_id!r} is from the broken plugin {plugin}: {plugin.broken}")
    near = did_you_mean(plugin_id, names(kind))
    message = f"no {SINGULAR[kind]} {plugin_id!r} is installed.{near}"
    broken = plugins().broken
    if broken:
        message += (
            f" ({len(broken)} broken: {', '.join(p.name for p in broken)}; see `rollart list`)"
        )
    return UnknownIdError(message + f" Run `rollart list {kind}` to list them.")


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
