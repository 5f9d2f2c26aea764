"""The name of a new package: which names are valid, and which are taken.

Takes: a kind, a name from the user, and optionally an id. Gives: :class:`PackageName`, from which
distribution, module, class and ids are derived. Never: creates anything, or imports a plugin's
classes.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final, Literal

from rollart_core.contracts.spec import ID_PATTERN, PluginSpec
from rollart_core.errors import UserError
from rollart_core.plugins.manager import CORE, KINDS, Registered, plugins

Kind = Literal["env", "tool", "agent", "reward", "algorithm", "mapper"]

REGISTERED_AS: Final[Mapping[Kind, str]] = {
    "env": "environments",
    "tool": "environments",
    "agent": "environments",
    "reward": "rewards",
    "algorithm": "algorithms",
    "mapper": "hardware_mappers",
}
"""Kind of a scaffold -> the kind that its plugin registers."""

RESERVED_NAMESPACES: Final = frozenset({"rollart", "webshop", "toy", "swe", "unregistered"})
"""Namespaces reserved for RollArt, in addition to those of the ids it registers."""

_SLUG: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MAX_SLUG: Final = 32
_LEFT_BY_TOOLS: Final = frozenset({"build", "dist", "runs", "venv"})
"""Folders that the templates' ``.gitignore`` and the build of a wheel exclude."""
_SUFFIXES: Final[Mapping[Kind, str]] = {
    "env": "Env",
    "tool": "Env",
    "agent": "Task",
    "reward": "Reward",
    "algorithm": "Algorithm",
    "mapper": "Mapper",
}


@dataclass(frozen=True, slots=True)
class PackageName:
    """The names in a new package."""

    kind: Kind
    slug: str
    """Distribution, folder, entry point and alias: ``acme-maze``."""
    plugin_id: str
    """``acme/Maze-v1``."""

    @property
    def module(self) -> str:
        """The import package: ``acme_maze``."""
        return self.slug.replace("-", "_")

    @property
    def namespace(self) -> str:
        """The namespace of the id: ``acme``."""
        return self.plugin_id.partition("/")[0]

    @property
    def name(self) -> str:
        """The name in the id, without the version: ``Maze``."""
        return self.plugin_id.partition("/")[2].rpartition("-v")[0]

    @property
    def base(self) -> str:
        """The prefix of class names: ``Maze``; always a Python identifier."""
        base = re.sub(r"\W", "", self.name)
        if base[0].isdigit() or base in _SUFFIXES.values():
            base = f"{_capital(re.sub(r'[^a-z0-9]', '', self.slug.partition('-')[0]))}{base}"
        return base

    @property
    def class_name(self) -> str:
        """The main class of the package: ``MazeEnv``."""
        suffix = _SUFFIXES[self.kind]
        return self.base if self.base.endswith(suffix) else self.base + suffix

    @property
    def specs(self) -> dict[str, tuple[str, str]]:
        """Registered specs: kind -> (id, alias). An environment also registers a reward."""
        made = {REGISTERED_AS[self.kind]: (self.plugin_id, self.slug)}
        if self.kind == "env":
            made["rewards"] = (f"{self.namespace}/{self.name}Reward-v1", f"{self.slug}-reward")
        return made


def name_package(kind: Kind, given: str, plugin_id: str | None = None) -> PackageName:
    """Return the names derived from ``given``, such as ``acme-maze``.

    Underscores count as hyphens: both spellings are one distribution and one module.

    Args:
        kind: The kind of the package.
        given: The name.
        plugin_id: ``namespace/Name-vN``; None: derived from the name.

    Raises:
        UserError: If it is not a valid name, or is reserved by RollArt or Python.
    """
    slug = given.replace("_", "-")
    if not _SLUG.fullmatch(slug) or len(slug) > _MAX_SLUG:
        raise UserError(_form_fault(given))
    module = slug.replace("-", "_")
    if keyword.iskeyword(module):
        raise UserError(f"{given!r} is a Python keyword: try {f'my-{slug}'!r}")
    if module in sys.stdlib_module_names or module in {"tests", "site_packages"}:
        raise UserError(f"{given!r} is a module of Python: try {f'my-{slug}'!r}")
    if module in _LEFT_BY_TOOLS:
        raise UserError(
            f"{given!r} is a folder that git and the build of a wheel exclude: try {f'my-{slug}'!r}"
        )
    if slug.partition("-")[0] == "rollart":
        raise UserError(
            f"{given!r}: 'rollart' and names that start with it are reserved; start with "
            "your team's name, such as acme-maze"
        )
    first, _, rest = slug.partition("-")
    derived = f"{first}/{''.join(map(_capital, (rest or first).split('-')))}-v1"
    name = PackageName(kind, slug, derived if plugin_id is None else plugin_id)
    _check_id(name)
    return name


def refuse_taken(name: PackageName) -> None:
    """Reject a name that an installed package or plugin already uses.

    Raises:
        UserError: With the name of the owner.
    """
    with suppress(PackageNotFoundError):
        raise UserError(
            f"distribution {name.slug!r} is already installed (version {version(name.slug)}): "
            f"choose another name, or run `pip uninstall {name.slug}` first"
        )
    if find_spec(name.module) is not None:
        raise UserError(f"a module {name.module!r} already exists: choose another name")
    for kind, (plugin_id, alias) in name.specs.items():
        _refuse_registered(kind, plugin_id, alias)


def _check_id(name: PackageName) -> None:
    if not ID_PATTERN.fullmatch(name.plugin_id):
        raise UserError(
            f"id {name.plugin_id!r} is not of the form 'namespace/Name-vN', such as acme/Maze-v1 "
            "(ASCII letters and digits, and a lower-case namespace)"
        )
    if name.namespace.partition("-")[0] == "rollart" or name.namespace in own_namespaces():
        raise UserError(
            f"the namespace {name.namespace!r} is reserved: give another with --id, such as "
            f"my-team/{name.name}-v1, or choose a name that starts with your team's"
        )


def own_namespaces() -> frozenset[str]:
    """Return the namespaces that are reserved for RollArt, here and in a registry."""
    ids = (key for kind in KINDS for key, r in plugins().registered(kind).items() if _is_own(r))
    return RESERVED_NAMESPACES | {key.partition("/")[0] for key in ids if "/" in key}


def _is_own(registered: Registered) -> bool:
    return registered.plugin.distribution == CORE


def _refuse_registered(kind: str, plugin_id: str, alias: str) -> None:
    for registered in _registered(kind):
        spec = registered.spec
        taken = {registered.key, spec.alias} if isinstance(spec, PluginSpec) else set()
        for wanted in (plugin_id, alias):
            if wanted in taken:
                raise UserError(
                    f"{wanted!r} is taken by plugin {registered.plugin}: choose another name, or "
                    "another id with --id"
                )


def _registered(kind: str) -> Iterable[Registered]:
    yield from plugins().registered(kind).values()
    yield from (r for r in plugins().broken_specs if r.kind == kind)


def _form_fault(given: str) -> str:
    near = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", given).lower())
    near = near.strip("-0123456789")[:_MAX_SLUG].strip("-")
    return (
        f"{given!r} is not a valid name: at most {_MAX_SLUG} small letters, digits and hyphens, "
        f"starting with a letter, such as {near or 'acme-maze'!r}"
    )


def _capital(part: str) -> str:
    return part[:1].upper() + part[1:]
