"""Versions of the plugin API: which this core speaks, and how one written for the last still works.

Takes: specs as plugins give them, and the classes they name. Gives: what is wrong with a version, a
spec as it is written today, a class that can be called as today. Never: changes a plugin of today's
version, or warns of one that uses nothing that has changed. ``docs/plugin-api.md`` is the promise.
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
"""What a hook module may say once, at its top, for all its specs that say nothing themselves."""


class PluginApiWarning(FutureWarning):
    """A plugin is used in a way that the next version of the plugin API no longer has."""


def version_fault(version: object) -> str | None:
    """Return why this core does not speak a version of the plugin API; None when it does."""
    if type(version) is not int or version < 1:
        return f"contract version {version!r} is no version: say {PLUGIN_API}"
    if version > PLUGIN_API:
        mend = "upgrade rollart, or install an older version of the plugin"
    elif version < OLDEST_PLUGIN_API:
        mend = "install a newer version of the plugin, or an older rollart"
    else:
        return None
    return f"contract version {version}, this RollArt speaks {_spoken()}: {mend}"


def declared(target: object) -> object:
    """Return the version that a hook module says at its top; 1, the first, when it says none."""
    return getattr(target, DECLARED, 1)


def as_today(spec: PluginSpec) -> PluginSpec:
    """Return a spec of an older version with the fields that say today what was true then."""
    if isinstance(spec, RewardBackendSpec) and spec.contract_version == 1:
        return replace(spec, in_process=True)  # there were no others
    if isinstance(spec, EnvSpec) and spec.contract_version == 1:
        return replace(spec, disjoint_splits=False)  # nothing was said of it
    return spec


def usable(spec: PluginSpec, cls: type[Any]) -> type[Any]:
    """Return the class behind a spec as today's core calls it; warns where it is not as today's."""
    if spec.contract_version != 1:
        return cls
    if isinstance(spec, RewardBackendSpec):
        _warn(spec, "its backend is built around the reward object: say in_process: true")
    elif _asks_no_size(cls):
        _warn(spec, "its extra_modules() takes no argument: write extra_modules(self, hidden_size)")
        return _with_size(cast("Any", cls))
    return cls


def _spoken() -> str:
    return " and ".join(str(v) for v in range(OLDEST_PLUGIN_API, PLUGIN_API + 1))


def _warn(spec: PluginSpec, what: str) -> None:
    text = f"{spec.id} speaks plugin API 1, which goes with 3: {what} and contract_version: 2"
    warnings.warn(text, PluginApiWarning, stacklevel=4)


def _asks_no_size(cls: type[Any]) -> bool:
    """Whether it is an algorithm whose ``extra_modules`` is that of version 1."""
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
        """Return the modules of an algorithm that asks for no size."""
        return cls.extra_modules(self)

    said = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**said, "extra_modules": extra_modules})
