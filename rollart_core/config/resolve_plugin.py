"""Resolve one plugin of a run config: find it, check its options and its class.

Takes: a plugin reference of a config. Gives: a picklable :class:`ResolvedPlugin`, or problems.
Never: builds a plugin, or stops at the first problem.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from rollart_core.config.base import PluginRef
from rollart_core.config.problems import Problem
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import RewardSpec
from rollart_core.contracts.spec import PluginSpec
from rollart_core.errors import UserError
from rollart_core.plugins import registry
from rollart_core.plugins.manager import Registered

SpecT = TypeVar("SpecT", bound=PluginSpec)
Note = Callable[[Problem], None]
_BOXED = ("environments", "reward_backends")
"""Kinds whose option ``sandbox`` selects a sandbox to run in."""


@dataclass(frozen=True, slots=True)
class ResolvedPlugin(Generic[SpecT]):
    """One plugin of a run, with checked options. It can be sent to any process."""

    kind: str
    spec: SpecT
    options: dict[str, Any]
    """Options that the plugin's config model checked, converted and filled with defaults."""
    distribution: str
    version: str

    def build(self, **context: object) -> Any:
        """Build the object: import its class in this process and pass the options.

        Args:
            context: Further keyword arguments from the caller.

        Raises:
            UserError: If the class cannot be imported here.
        """
        return self.cls()(**self.options, **context)

    def cls(self) -> type[Any]:
        """Return the class, imported in this process."""
        return registry.resolve(self.kind, self.spec.id)


@dataclass(frozen=True, slots=True)
class PluginFinder:
    """Finds plugins and notes problems instead of stopping at the first."""

    note: Note
    import_classes: bool
    look_here: bool = False
    """Whether executables, images and files in options must exist on this machine."""

    def __call__(self, kind: str, ref: PluginRef, *key: str | int) -> Any:
        """Return the plugin at ``key`` of the config, or None if it cannot be resolved."""
        if kind == "environments" and registry.ISOLATION in ref.options:
            return self._isolated(ref, key)
        try:
            found = registry.find(kind, ref.id)
        except UserError as e:
            self.note(Problem((*key, "id") if ref.options else key, str(e)))
            return None
        try:
            faults = registry.option_problems(kind, ref.id, ref.options)
            options = {} if faults else registry.checked_options(kind, ref.id, ref.options)
            self._check_class(kind, ref.id, found.spec.entry_point)
            if self.look_here and not faults:
                faults = missing(kind, ref.id, options)
        except UserError as e:
            self.note(Problem(key, str(e)))
            return None
        for fault in faults:
            self.note(fault.under(*key))
        return self._resolved(found, options, not faults, key)

    def _resolved(
        self, found: Registered, options: dict[str, Any], complete: bool, key: tuple[str | int, ...]
    ) -> Any:
        plugin, spec = found.plugin, cast("PluginSpec", found.spec)
        if complete and isinstance(spec, EnvSpec) and ":" in spec.id:
            try:
                spec = registry.env_spec(spec.id, options)
            except UserError as e:
                self.note(Problem((*key, "id") if options else key, str(e)))
                return None
        if isinstance(spec, RewardSpec) and ":" in spec.id:
            spec = registry.spec("rewards", spec.id)
        return ResolvedPlugin(found.kind, spec, options, plugin.distribution, plugin.version)

    def _isolated(self, ref: PluginRef, key: tuple[str | int, ...]) -> Any:
        """Query the environment's sandbox; the environment need not be installed here."""
        try:
            service = registry.sandbox_service()
            faults = service.option_problems(ref.id, ref.options)
            for fault in faults:
                self.note(fault.under(*key))
            if faults:
                return None
            said = service.describe(ref.id, ref.options)
        except UserError as e:
            self.note(Problem(key, str(e)))
            return None
        return ResolvedPlugin(
            "environments", said.spec, dict(said.options), said.distribution, said.version
        )

    def _check_class(self, kind: str, plugin_id: str, entry_point: str) -> None:
        module = entry_point.partition(":")[0]
        if self.import_classes or ":" in plugin_id or not _exists(module):
            registry.resolve(kind, plugin_id)


def missing(kind: str, plugin_id: str, options: Mapping[str, Any]) -> list[Problem]:
    """Return the executables, images and folders in options that this machine lacks.

    A config model may define a method ``missing() -> Mapping[str, str]``: option -> what is
    missing, and how to fix it. Nothing is started, fetched or imported.

    Args:
        kind: The kind of the plugin.
        plugin_id: The id of the plugin.
        options: The options, checked by its config model.
    """
    model = registry.config_model(kind, plugin_id)
    find_missing = getattr(model, "missing", None)
    found = []
    if model is not None and find_missing is not None:
        told: Mapping[str, str] = find_missing(model(**options))
        found = [Problem((option,), message) for option, message in told.items()]
    sandbox = options.get("sandbox") if kind in _BOXED else None
    if sandbox is None:
        return found
    ref = PluginRef.model_validate(sandbox)
    try:
        return found + [p.under("sandbox") for p in missing("sandboxes", ref.id, ref.options)]
    except (UserError, ValueError):  # reported by the check of the sandbox's options
        return found


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def ref_of(plugin: ResolvedPlugin[Any]) -> dict[str, Any]:
    """Return the plugin as plain data for a config file: its id and all its options."""
    return {"id": plugin.spec.id, **plugin.options}
