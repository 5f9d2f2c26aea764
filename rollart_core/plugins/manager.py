"""Plugins: discovery by entry points, and validation of each plugin.

Takes: the entry points of group ``rollart``, the modules named in ``ROLLART_PLUGINS`` (comma
separated), and objects from tests. Gives: :class:`Plugins`, which has every spec in the form of
this release, and the broken plugins with reasons. Never: imports the class of a spec, or lets one
plugin affect another. A plugin that breaks a rule is *broken*, with the reason. All others work.
"""

from __future__ import annotations

import importlib
import logging
import os
import reprlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final, TextIO, cast

import pluggy

from rollart_core.contracts.adapter import EnvAdapterSpec
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.forward_pass import ForwardPassSpec
from rollart_core.contracts.hardware import HardwareMapperSpec
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.reward import RewardBackendSpec, RewardSpec
from rollart_core.contracts.runtime import RuntimeSpec
from rollart_core.contracts.sandbox import SandboxSpec
from rollart_core.contracts.sandbox_service import SandboxServiceSpec
from rollart_core.contracts.spec import ID_PATTERN, CommandSpec, PluginSpec
from rollart_core.contracts.tool_format import ToolFormatSpec
from rollart_core.contracts.tracker import TrackerSpec
from rollart_core.contracts.weights import WeightChannelSpec
from rollart_core.errors import PluginError, described, did_you_mean, first_line, is_from_outside
from rollart_core.plugins import api_version as plugin_api
from rollart_core.plugins import hookspecs

_lock = threading.Lock()
_num_open = 0
"""Number of open blocks, over all threads."""


class _Depth(threading.local):
    value = 0
    """Number of blocks that this thread is in."""


_depth = _Depth()


class _Stream:
    """A stream that redirects the writes of threads that are in a block.

    Args:
        stream: The real stream, used for everything except redirected writes.
        diverted: The attribute of ``sys.stderr`` that receives redirected writes. If empty,
            ``sys.stderr`` itself.
    """

    def __init__(self, stream: Any, diverted: str = "") -> None:
        self._stream = stream
        self._diverted = diverted

    def write(self, data: Any) -> int:
        """Write to the target of this thread."""
        target = self._target()
        if target is None:  # a process without stderr
            return len(data)
        written: int = target.write(data)
        return written

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the target of this thread."""
        target = self._target()
        if target is not None:
            target.flush()

    @property
    def buffer(self) -> Any:
        """The underlying binary stream, redirected as well."""
        return _Stream(self._stream.buffer, "buffer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _target(self) -> Any:
        if not _depth.value:
            return self._stream
        return getattr(sys.stderr, self._diverted, None) if self._diverted else sys.stderr


@contextmanager
def output_of_plugins() -> Iterator[None]:
    """Redirect the output of this thread to stderr within the block.

    Another thread may open a block meanwhile, or replace ``sys.stdout``. No output of the program
    is lost, in whichever order the blocks end.
    """
    global _num_open
    with _lock:
        _num_open += 1
        if sys.stdout is not None and not isinstance(sys.stdout, _Stream):
            sys.stdout = cast(TextIO, _Stream(sys.stdout))
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
        with _lock:
            _num_open -= 1
            # If other code has replaced stdout meanwhile, its replacement stays.
            if _num_open == 0 and isinstance(sys.stdout, _Stream):
                sys.stdout = sys.stdout._stream


GROUP: Final = "rollart"
CORE: Final = "rollart"
"""RollArt's own distribution. In a name conflict with it, the other plugin is broken."""

AnySpec = PluginSpec | CommandSpec

KINDS: Final[Mapping[str, type[AnySpec]]] = MappingProxyType(
    {
        "environments": EnvSpec,
        "rewards": RewardSpec,
        "algorithms": AlgorithmSpec,
        "hardware_mappers": HardwareMapperSpec,
        "inference_engines": InferenceEngineSpec,
        "sandboxes": SandboxSpec,
        "reward_backends": RewardBackendSpec,
        "weight_channels": WeightChannelSpec,
        "trackers": TrackerSpec,
        "env_adapters": EnvAdapterSpec,
        "runtimes": RuntimeSpec,
        "forward_passes": ForwardPassSpec,
        "sandbox_services": SandboxServiceSpec,
        "tool_formats": ToolFormatSpec,
        "commands": CommandSpec,
    }
)
"""Kind -> the spec class of the list that the hook ``rollart_<kind>`` returns."""

_log = logging.getLogger(__name__)

RESERVED_COMMANDS: Final = frozenset(
    """run sft eval list info play new-env new-reward new-algorithm new-mapper check registry plan
    simulate audit view replay rescore doctor
    build sandbox model plot export scale bench diagnose""".split()  # noqa: SIM905 - one word a command
)
"""Command names that are reserved for RollArt."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin: its origin and its state."""

    name: str
    """Name of the entry point."""
    module: str
    distribution: str
    version: str
    broken: str | None = None
    """Why the plugin cannot be used. None if it works."""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Registered:
    """One spec and the plugin that registers it."""

    kind: str
    spec: AnySpec
    plugin: Plugin

    @property
    def key(self) -> str:
        """The id of the spec, or the name of the command."""
        return key_of(self.spec)


@dataclass(slots=True)
class _Candidate:
    """A plugin during validation."""

    plugin: Plugin
    target: object = None
    specs: list[tuple[str, AnySpec]] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        """Mark the plugin as broken. Keep the first reason."""
        if self.plugin.broken is None:
            self.plugin = replace(self.plugin, broken=reason)


class Plugins:
    """All plugins of this process, working and broken."""

    def __init__(self, candidates: Iterable[_Candidate]) -> None:
        all_candidates = sorted(candidates, key=lambda c: (c.plugin.distribution, c.plugin.name))
        self.plugins: tuple[Plugin, ...] = tuple(c.plugin for c in all_candidates)
        self._by_kind: dict[str, dict[str, Registered]] = {kind: {} for kind in KINDS}
        self._broken: list[Registered] = []
        self._off: set[tuple[str, str]] = set()
        self._manager = _new_manager()
        for candidate in all_candidates:
            self._add(candidate)

    def _add(self, candidate: _Candidate) -> None:
        for kind, spec in candidate.specs:
            registered = Registered(kind, spec, candidate.plugin)
            if candidate.plugin.broken is None:
                self._by_kind[kind][registered.key] = registered
            else:
                self._broken.append(registered)
        if candidate.plugin.broken is None and not self._manager.is_registered(candidate.target):
            self._manager.register(candidate.target, candidate.plugin.name)

    def registered(self, kind: str) -> Mapping[str, Registered]:
        """Return the specs of working plugins: id (or command name) -> spec and plugin."""
        return MappingProxyType(self._by_kind[kind])

    @property
    def broken(self) -> tuple[Plugin, ...]:
        """The plugins that cannot be used, each with its reason."""
        return tuple(p for p in self.plugins if p.broken is not None)

    @property
    def broken_specs(self) -> tuple[Registered, ...]:
        """The specs of broken plugins that were read before the failure."""
        return tuple(self._broken)

    def observe(self, hook: str, /, **event: object) -> None:
        """Call an observing hook. An observer that raises is logged once and disabled.

        Args:
            hook: Such as ``"rollart_run_started"``.
            event: The hook's arguments, by name.
        """
        for impl in self._impls(hook):
            self._call(impl, hook, event)

    def decide(self, hook: str, /, **event: object) -> object:
        """Call a deciding hook and return the first answer that is not None, else None.

        A plugin that raises is logged once and disabled, as in :meth:`observe`.
        """
        for impl in self._impls(hook):
            answer = self._call(impl, hook, event)
            if answer is not None:
                return answer
        return None

    def _impls(self, hook: str) -> Iterator[pluggy.HookImpl]:
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        for impl in reversed(caller.get_hookimpls()):
            if (impl.plugin_name, hook) not in self._off:
                yield impl

    def _call(self, impl: pluggy.HookImpl, hook: str, event: Mapping[str, object]) -> object:
        try:
            return impl.function(*(event[name] for name in impl.argnames))
        except BaseException as e:
            if is_from_outside(e):
                raise
            self._off.add((impl.plugin_name, hook))
            _log.warning(
                "plugin %r raised in %s and is not called again in this run: %s",
                *(impl.plugin_name, hook, described(e)),
                exc_info=_log.isEnabledFor(logging.DEBUG),
            )
            return None


_current: Plugins | None = None
_loading = threading.RLock()
_LOADED_WITHIN_S: Final = 60.0
"""Maximum time a thread waits for another thread to load the plugins. Then it loads them itself,
because the other thread may wait for this one: for the import lock of a module that uses plugins at
its import."""


def plugins() -> Plugins:
    """Return the plugins of this process. The first call loads them, in one thread."""
    global _current
    if _current is None:
        is_alone = _loading.acquire(timeout=_LOADED_WITHIN_S)
        try:
            if _current is None:
                _current = load()
        finally:
            if is_alone:
                _loading.release()
    return _current


@contextmanager
def using(extra: Mapping[str, object]) -> Iterator[Plugins]:
    """Add the plugin objects of ``extra`` to this process within the block. For tests."""
    global _current
    before, _current = _current, load(extra)
    try:
        yield _current
    finally:
        _current = before


def load(
    extra: Mapping[str, object] | None = None, *, found: Iterable[EntryPoint] | None = None
) -> Plugins:
    """Load and validate every plugin again.

    Args:
        extra: Plugin name -> plugin object (a module, or anything with hook implementations).
        found: The entry points. None means those of the installed distributions.
    """
    found = entry_points(group=GROUP) if found is None else found
    named = os.environ.get("ROLLART_PLUGINS", "").split(",")
    candidates = [_from_entry_point(entry) for entry in found]
    for module in filter(None, map(str.strip, named)):
        candidate = _from_environ(module)
        if candidate.target is None or all(c.target is not candidate.target for c in candidates):
            candidates.append(candidate)  # skip modules that are installed or already named
    for name, target in (extra or {}).items():
        module = getattr(target, "__name__", type(target).__name__)
        candidates.append(_Candidate(Plugin(name, module, f"extra:{name}", "0"), target))
    _refuse_shared(candidates, "the entry-point name", _names)
    manager = _new_manager()
    for candidate in candidates:
        if candidate.plugin.broken is None:
            manager = _examined(candidate, manager)
    for kind in KINDS:
        _refuse_shared(candidates, f"among {kind}, the id", partial(_keys, kind))
        _refuse_shared(candidates, f"among {kind}, the alias", partial(_aliases, kind))
    return Plugins(candidates)


def _from_entry_point(found: EntryPoint) -> _Candidate:
    name, version = _name_and_version(found.dist) if found.dist else ("?", "?")
    candidate = _Candidate(Plugin(found.name, found.value, name, version))
    _import(candidate, found.value)
    return candidate


@lru_cache(maxsize=256)
def _name_and_version(dist: Distribution) -> tuple[str, str]:
    """Return both from one read of the metadata, because each read parses it again."""
    metadata = dist.metadata  # empty if an uninstall left only the entry points
    said = {key: metadata[key] for key in ("Name", "Version") if key in metadata}
    return said.get("Name", "?"), said.get("Version", "?")


def _from_environ(module: str) -> _Candidate:
    candidate = _Candidate(Plugin(module, module, "ROLLART_PLUGINS", "0"))
    _import(candidate, module)
    return candidate


def _import(candidate: _Candidate, value: str) -> None:
    module, _, attribute = value.partition(":")
    try:
        with output_of_plugins():
            target: object = importlib.import_module(module)
        for part in filter(None, attribute.split(".")):
            target = getattr(target, part)
        candidate.target = target
    except BaseException as e:
        if is_from_outside(e):
            raise
        candidate.fail(f"cannot import {value}: {described(e)}")


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def _examined(candidate: _Candidate, manager: pluggy.PluginManager) -> pluggy.PluginManager:
    """Call :func:`_examine`. If the plugin's own code raises, mark the plugin as broken."""
    try:
        if candidate.target is not None:
            return _examine(candidate, manager)
        candidate.fail(f"{candidate.plugin.module} is None, which has no hooks")
        return manager
    except BaseException as e:
        if is_from_outside(e):
            raise
        candidate.fail(f"its hooks cannot be read: {described(e)}")
        return _new_manager()


def _examine(candidate: _Candidate, manager: pluggy.PluginManager) -> pluggy.PluginManager:
    """Validate the hooks of one plugin, then their results.

    Args:
        candidate: The plugin.
        manager: A manager without plugins.

    Returns:
        A manager for the next plugin. It is reused because creating one is slower than the check.
    """
    try:
        manager.register(candidate.target, candidate.plugin.name)
    except pluggy.PluginValidationError as e:
        said = first_line(str(e).splitlines()[-1])
        candidate.fail(f"a hook does not fit its specification: {said}")
        return _new_manager()  # the plugin is partly registered on the old one
    known = [n for n in vars(hookspecs) if n.startswith("rollart_")]
    for name in sorted(n for n in dir(candidate.target) if n.startswith("rollart_")):
        member = getattr(candidate.target, name)
        if callable(member) and not hasattr(member, "rollart_impl") and name in known:
            candidate.fail(f"{name} lacks the @hookimpl decorator")
    for caller in manager.get_hookcallers(candidate.target) or ():
        if not caller.has_spec():
            candidate.fail(f"there is no hook {caller.name!r}.{did_you_mean(caller.name, known)}")
    for kind in KINDS:
        for impl in getattr(manager.hook, f"rollart_{kind}").get_hookimpls():
            _collect(candidate, kind, impl)
    manager.unregister(candidate.target)
    return manager


def _collect(candidate: _Candidate, kind: str, impl: pluggy.HookImpl) -> None:
    hook = f"rollart_{kind}"
    if impl.wrapper or impl.hookwrapper:
        candidate.fail(f"{hook} cannot be wrapped: each plugin registers its own")
        return
    try:
        with output_of_plugins():
            specs = list(cast("Iterable[object]", impl.function()))
    except PluginError as e:  # of a manifest: all its faults in one line
        candidate.fail("; ".join(str(e).splitlines()))
        return
    except BaseException as e:
        if is_from_outside(e):
            raise
        candidate.fail(f"{hook} raised {described(e)}")
        return
    for spec in specs:
        wanted = KINDS[kind]
        if not isinstance(spec, wanted):
            candidate.fail(f"{hook} returned a {type(spec).__name__}, not a {wanted.__name__}")
            continue
        if fault := text_fault(spec):
            candidate.fail(f"{hook}: {fault}")
            continue  # such an id or alias cannot be looked up
        spec = of_its_version(spec, candidate.target)
        candidate.specs.append((kind, spec))
        reason = spec_fault(spec, is_own=candidate.plugin.distribution == CORE)
        if reason:
            candidate.fail(reason)


def _names(candidate: _Candidate) -> list[str]:
    return [candidate.plugin.name]


def _keys(kind: str, candidate: _Candidate) -> list[str]:
    return [key_of(spec) for k, spec in candidate.specs if k == kind]


def _aliases(kind: str, candidate: _Candidate) -> list[str]:
    specs = [s for k, s in candidate.specs if k == kind and isinstance(s, PluginSpec)]
    return [s.alias for s in specs if s.alias is not None]


def _refuse_shared(
    candidates: list[_Candidate], what: str, names_of: Callable[[_Candidate], list[str]]
) -> None:
    """Mark plugins with the same name as broken. RollArt's own plugins keep their names.

    Between two other plugins, the owner of the name is unknown, so both are broken. A run never
    gets a different plugin than it names.
    """
    claims: dict[str, list[_Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.plugin.broken is None:
            for name in names_of(candidate):
                claims[name].append(candidate)
    for name, claimants in claims.items():
        if len(claimants) < 2:
            continue
        sides = " and ".join(str(c.plugin) for c in claimants)
        owned = {c.plugin.distribution for c in claimants} != {CORE}
        for claimant in claimants:
            if not (owned and claimant.plugin.distribution == CORE):
                claimant.fail(f"{what} {name!r} is claimed by {sides}: uninstall or rename one")


def text_fault(spec: AnySpec) -> str | None:
    """Return the problem if a text field of a spec is not text. Annotations do not enforce it."""
    needed = ("name" if isinstance(spec, CommandSpec) else "id", "entry_point")
    for name in (*needed, "alias", "config", "summary"):
        value = getattr(spec, name, None)
        if not isinstance(value, str) and (value is not None or name in needed):
            return f"{name} must be text, got {reprlib.repr(value)}"
    return None


def of_its_version(spec: AnySpec, target: object) -> AnySpec:
    """Return a spec in the form of this release, for any API version that its module declares."""
    if isinstance(spec, CommandSpec):
        return spec
    if not spec.contract_version:
        # The declared value may not be a number. The version check reports that.
        spec = replace(spec, contract_version=cast("int", plugin_api.declared(target)))
    return plugin_api.as_today(spec)


def spec_fault(spec: AnySpec, *, is_own: bool = False) -> str | None:
    """Return why a spec cannot be registered. None if it can.

    Args:
        spec: The spec from a hook.
        is_own: Whether the spec is from RollArt's own distribution, which may use reserved command
            names.
    """
    if ":" not in spec.entry_point:
        return f"{key_of(spec)}: entry_point {spec.entry_point!r} is not of the form 'module:Class'"
    if isinstance(spec, CommandSpec):
        taken = spec.name in RESERVED_COMMANDS and not is_own
        return f"command {spec.name!r} is one of RollArt's own" if taken else None
    fault = plugin_api.version_fault(spec.contract_version)
    if fault:
        return f"{spec.id} speaks {fault}"
    if not ID_PATTERN.match(spec.id):
        return f"id {spec.id!r} is not of the form 'namespace/Name-vN'"
    return None


def key_of(spec: AnySpec) -> str:
    """Return the id, or the name of a command."""
    return spec.name if isinstance(spec, CommandSpec) else spec.id
