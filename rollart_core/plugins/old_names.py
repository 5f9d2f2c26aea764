"""Old names of modules, and of what is in them, until the version :data:`REMOVED_IN`.

    import rollart_core.engine.journal  --> a stand-in for rollart_core.store.journal, and a warning

Takes: the table ``old_names.json``, which ``scripts/restructure`` generates. Gives: modules whose
attributes are those of the modules with the new names. Never: reads the table before a name of ours
is missing; nor takes precedence over a module that exists.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

REMOVED_IN: Final = "0.3"
"""The version without these names."""
PREFIX: Final = "rollart_"


@cache
def old_modules() -> Mapping[str, str]:
    """Return the old names of modules and packages -> the new ones."""
    modules: dict[str, str] = _table()["modules"]
    return modules


@cache
def old_members() -> Mapping[str, Mapping[str, str]]:
    """Return modules, by their new names -> the old names of what is in them -> the new ones.

    A new name with a colon, ``module:name``, is in another module.
    """
    members: dict[str, dict[str, str]] = _table()["members"]
    return members


@cache
def _table() -> Any:
    return json.loads(Path(__file__).with_name("old_names.json").read_text(encoding="utf-8"))


def install() -> None:
    """Have old names imported from now on; more than once does nothing more."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())


def member(module: str, name: str) -> Any:
    """Return what is called ``name`` in a module, by its old or its new name.

    Args:
        module: The new name of the module.
        name: Of a class, function or constant.

    Raises:
        AttributeError: When it has neither.
    """
    where, _, attribute = old_members().get(module, {}).get(name, name).rpartition(":")
    return getattr(import_module(where or module), attribute)


class StandIn(ModuleType):
    """A module by its old name."""

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module with the new name."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return member(old_modules()[self.__name__], name)

    def __dir__(self) -> list[str]:
        """Return what the module with the new name has."""
        return dir(import_module(old_modules()[self.__name__]))


class OldNames:
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in; None for all but an old name."""
        if not fullname.startswith(PREFIX) or fullname not in old_modules():
            return None
        return ModuleSpec(fullname, cast("Loader", self), is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stand-in and warn the importing code."""
        warnings.warn(
            f"{spec.name} is now {old_modules()[spec.name]}; RollArt {REMOVED_IN} removes the old "
            "name",
            DeprecationWarning,
            stacklevel=2,
        )
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes are looked up when they are asked for."""


def member_of_package(package: str, module: str, name: str) -> Any:
    """Return what was in a module that is a package now, and warn its caller.

    Args:
        package: The name of both.
        module: Where its content is now.
        name: Of a class, function or constant.

    Raises:
        AttributeError: When there was no such thing.
    """
    if name.startswith("_") or PathFinder.find_spec(
        f"{package}.{name}", sys.modules[package].__path__
    ):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        found = member(module, name)
    except AttributeError:
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
    warnings.warn(
        f"{package}.{name} is now {module}.{name}; RollArt {REMOVED_IN} removes the old name",
        DeprecationWarning,
        stacklevel=3,
    )
    return found
