"""Old names of modules and of their members, until the version :data:`REMOVED_IN`.

    import rollart_core.engine.journal  --> a stand-in for rollart_core.store.journal, and a warning

Takes: the table ``old_names.json``, which ``scripts/restructure`` generates. Gives: stand-in
modules with the attributes of the renamed modules. Never: reads the table before a RollArt module
is missing, or takes precedence over an existing module.
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
"""The version that removes these names."""
PREFIX: Final = "rollart_"


@cache
def old_modules() -> Mapping[str, str]:
    """Return old name -> new name of modules and packages."""
    modules: dict[str, str] = _table()["modules"]
    return modules


@cache
def old_members() -> Mapping[str, Mapping[str, str]]:
    """Return new module name -> old member name -> new member name.

    A new name with a colon, ``module:name``, is in another module.
    """
    members: dict[str, dict[str, str]] = _table()["members"]
    return members


@cache
def _table() -> Any:
    return json.loads(Path(__file__).with_name("old_names.json").read_text(encoding="utf-8"))


def install() -> None:
    """Enable imports by old names. Further calls do nothing."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())


def member(module: str, name: str) -> Any:
    """Return the member ``name`` of a module, by its old or its new name.

    Args:
        module: The new name of the module.
        name: Name of a class, function or constant.

    Raises:
        AttributeError: If the module has no member of that name.
    """
    where, _, attribute = old_members().get(module, {}).get(name, name).rpartition(":")
    return getattr(import_module(where or module), attribute)


class StandIn(ModuleType):
    """A module with an old name."""

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module with the new name."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return member(old_modules()[self.__name__], name)

    def __dir__(self) -> list[str]:
        """Return the members of the module with the new name."""
        return dir(import_module(old_modules()[self.__name__]))


class OldNames:
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in, or None if the name is not an old name."""
        if not fullname.startswith(PREFIX) or fullname not in old_modules():
            return None
        return ModuleSpec(fullname, cast("Loader", self), is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the stand-in and warn the importing code."""
        warnings.warn(
            f"{spec.name} is now {old_modules()[spec.name]}; RollArt {REMOVED_IN} removes the old "
            "name",
            DeprecationWarning,
            stacklevel=2,
        )
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes are looked up at their first use."""


def member_of_package(package: str, module: str, name: str) -> Any:
    """Return a member of a module that is now a package, and warn the caller.

    Args:
        package: Name of the old module and of the package.
        module: The module that now has the content.
        name: Name of a class, function or constant.

    Raises:
        AttributeError: If there was no such member.
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
