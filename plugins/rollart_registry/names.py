"""Names in a registry: owners, ``ID@VERSION``, and which owner a distribution belongs to.

Takes: strings. Gives: validated names. Never: reads or writes a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rollart_core.contracts.spec import ID_PATTERN
from rollart_core.errors import RegistryError
from rollart_plugins.package_names import own_namespaces

OWNER_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
RESERVED_OWNERS: Final = frozenset({"root", "targets", "snapshot", "timestamp", "index"})
"""TUF's roles and the index page of a site; RollArt's own namespaces are reserved too."""


class Wanted(NamedTuple):
    """A requested package: ``acme/Maze-v1`` or ``acme/Maze-v1@1.2.0``."""

    id: str
    version: str | None

    @property
    def owner(self) -> str:
        """The namespace of the id."""
        return self.id.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.id}@{self.version}" if self.version else self.id


def parse_wanted(text: str) -> Wanted:
    """Return the id and version that ``ID[@VERSION]`` names.

    Raises:
        RegistryError: If the id or the version is malformed.
    """
    plugin_id, at, version = text.partition("@")
    if not ID_PATTERN.match(plugin_id):
        raise RegistryError(f"{text!r} is not an id such as acme/Maze-v1 or acme/Maze-v1@1.2.0")
    if not at:
        return Wanted(plugin_id, None)
    try:
        return Wanted(plugin_id, str(Version(version)))
    except InvalidVersion:
        message = f"{text!r}: {version!r} is not a version; a version looks like 1.2.0"
        raise RegistryError(message) from None


def check_owner(name: str, taken: Iterable[str] = ()) -> str:
    """Return ``name`` if it is valid and free for a new owner.

    Args:
        name: The owner's name, also the namespace of its ids.
        taken: The existing owners. Names that differ only in ``-`` and ``_`` are equal, as for
            distributions.

    Raises:
        RegistryError: If it is malformed, reserved or taken.
    """
    if not OWNER_PATTERN.fullmatch(name) or name[-1] in "-_":
        allowed = (
            "lower-case letters, digits, - and _, a letter or digit first and last, 64 at most"
        )
        raise RegistryError(f"owner {name!r}: a name is made of {allowed}")
    canonical = canonicalize_name(name)
    ours = {canonicalize_name(own) for own in own_namespaces()}
    if canonical in RESERVED_OWNERS | ours or canonical.split("-")[0] == "rollart":
        raise RegistryError(f"owner {name!r}: the name is reserved; choose another")
    for other in taken:
        if canonicalize_name(other) == canonical:
            raise RegistryError(f"owner {name!r}: the name is taken (by {other!r}); choose another")
    return name


def owner_of_distribution(distribution: str, owners: Iterable[str]) -> str | None:
    """Return the owner of a distribution: the owner with the longest name that it begins with.

    ``acme-maze`` belongs to acme, and ``acme-labs-maze`` to acme-labs if that owner exists. So no
    owner can publish ``numpy``, or take the name of another owner's package.
    """
    name = canonicalize_name(distribution)
    fitting = [
        owner
        for owner in owners
        if name == (prefix := canonicalize_name(owner)) or name.startswith(f"{prefix}-")
    ]
    return max(fitting, key=lambda owner: len(canonicalize_name(owner)), default=None)
