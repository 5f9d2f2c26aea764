"""``rollart.lock``: the installed packages, so that another machine installs the same ones.

Takes: a plan, or a file. Gives: :class:`Lock`. Never: holds the URL of an index, which may contain
a password; packages from an index are identified by version and hash.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rollart_core.errors import RegistryError
from rollart_registry.interpreter import Pinned
from rollart_registry.plan import Plan
from rollart_registry.tree import write_whole
from rollart_registry.trust import Trusted


@dataclass(frozen=True, slots=True)
class LockedRoot:
    """The root that the registry was trusted with."""

    version: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One wheel."""

    name: str
    version: str
    sha256: str
    file: str
    target: str | None = None
    """Its path in the registry; None if it is from the user's index."""

    def pinned(self) -> Pinned:
        """Return it as a pinned package of an index."""
        return Pinned(self.name, self.version, self.sha256, self.file)


@dataclass(frozen=True, slots=True)
class LockedPresent:
    """A required package that was already installed; only its version is compared."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The packages installed from one registry."""

    lock_version: Literal[1] = 1
    registry: str
    root: LockedRoot
    ids: tuple[str, ...]
    packages: tuple[LockedPackage, ...]
    present: tuple[LockedPresent, ...]

    def write(self, path: Path) -> None:
        """Write the lock file atomically."""
        write_whole(path, (json.dumps(asdict(self), indent=2) + "\n").encode())


def lock_of(plan: Plan, trusted: Trusted) -> Lock:
    """Return the lock of one installation."""
    ours = [
        LockedPackage(r.distribution, r.version, r.sha256, r.wheel, r.target)
        for r, _ in plan.releases
    ]
    others = [LockedPackage(p.name, p.version, p.sha256, p.file) for p in plan.pinned]
    return Lock(
        registry=trusted.base,
        root=LockedRoot(trusted.root_version, trusted.fingerprint),
        ids=(plan.wanted.id,),
        packages=tuple(ours + others),
        present=tuple(LockedPresent(name, version) for name, version in plan.present),
    )


def merged(old: Lock | None, new: Lock, path: Path) -> Lock:
    """Merge a new lock into an existing lock file; newer entries replace older ones.

    Raises:
        RegistryError: If the file locks packages of another registry.
    """
    if old is None:
        return new
    if (old.registry, old.root) != (new.registry, new.root):
        raise RegistryError(
            f"{path} locks packages of {old.registry}; give --lock another file for {new.registry}"
        )
    now = {p.name: p.version for p in new.present}
    kept = [p for p in old.packages if now.get(p.name, p.version) == p.version]
    packages = {p.name: p for p in (*kept, *new.packages)}
    present = {p.name: p for p in (*old.present, *new.present) if p.name not in packages}
    return replace(
        new,
        ids=tuple(dict.fromkeys((*old.ids, *new.ids))),
        packages=tuple(packages.values()),
        present=tuple(present.values()),
    )


def read_lock(path: Path) -> Lock:
    """Read a lock.

    Raises:
        RegistryError: If it is missing or malformed.
    """
    try:
        return _adapter().validate_json(path.read_bytes())
    except OSError as e:
        message = f"cannot read {path}: {e.strerror}; `rollart registry install` writes one"
        raise RegistryError(message) from e
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise RegistryError(f"{path} is not a lock file: {what}") from e


@cache
def _adapter() -> TypeAdapter[Lock]:
    return TypeAdapter(Lock)
