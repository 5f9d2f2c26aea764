"""Versions of the plugin API: validation, and compatibility with the previous version.

Takes: the specs of plugins and their classes. Gives: the problem of a version, a spec in the
current form, a class with the current interface. Never: changes a plugin of the current version, or
warns if a plugin uses nothing that has changed. ``docs/reference/plugin-api.md`` documents the
guarantees.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from functools import cache
from typing import Any, Final, cast

from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import RewardBackendSpec
from rollart_core.contracts.spec import OLDEST_PLUGIN_API, PLUGIN_API, PluginSpec

DECLARED: Final = "CONTRACT_VERSION"
"""A hook module sets this once, for all its specs without a version."""


class PluginApiWarning(FutureWarning):
    """A plugin uses a feature that the next version of the plugin API removes."""


def version_fault(version: object) -> str | None:
    """Return why this core does not support a version of the plugin API. None if it does."""
    if type(version) is not int or version < 1:
        return f"contract version {version!r} is not a version: use {PLUGIN_API}"
    if version > PLUGIN_API:
        mend = "upgrade rollart, or install an older version of the plugin"
    elif version < OLDEST_PLUGIN_API:
        mend = "install a newer version of the plugin, or an older rollart"
    else:
        return None
    return f"contract version {version}, this RollArt supports {_spoken()}: {mend}"


def declared(target: object) -> object:
    """Return the version that a hook module declares, or 1, the first, if it declares none."""
    return getattr(target, DECLARED, 1)


def as_today(spec: PluginSpec) -> PluginSpec:
    """Return a spec of an older version, converted to the current fields."""
    if isinstance(spec, RewardBackendSpec) and spec.contract_version == 1:
        return replace(spec, in_process=True)  # version 1 had no other backends
    if isinstance(spec, EnvSpec) and spec.contract_version == 1:
        return replace(spec, disjoint_splits=False)  # version 1 did not declare it
    return spec


def usable(spec: PluginSpec, cls: type[Any]) -> type[Any]:
    """Return the class of a spec with the current interface. Warn if the class has an older one."""
    if spec.contract_version != 1:
        return cls
    if isinstance(spec, RewardBackendSpec):
        _warn(spec, "its backend is built with the reward object: set in_process: true")
    elif _asks_no_size(cls):
        _warn(spec, "its extra_modules() takes no argument: write extra_modules(self, hidden_size)")
        return _with_size(cast("Any", cls))
    return cls


def _spoken() -> str:
    return " and ".join(str(v) for v in range(OLDEST_PLUGIN_API, PLUGIN_API + 1))


def _warn(spec: PluginSpec, what: str) -> None:
    text = f"{spec.id} uses plugin API 1, which version 3 removes: {what} and contract_version: 2"
    warnings.warn(text, PluginApiWarning, stacklevel=4)


def _asks_no_size(cls: type[Any]) -> bool:
    """Return whether a class is an algorithm whose ``extra_modules`` is that of version 1."""
    method = getattr(cls, "extra_modules", None)
    if method is None:
        return False
    try:
        inspect.signature(method).bind(None, 0)
    except TypeError:
        return True
    return False


@cache
def _with_size(cls: Any) -> type[Any]:
    def extra_modules(self: Any, hidden_size: int) -> Any:
        """Return the modules of an algorithm whose method takes no size."""
        return cls.extra_modules(self)

    said = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**said, "extra_modules": extra_modules})
