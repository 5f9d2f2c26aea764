"""Which registries this person trusts: for each the root it was first trusted with.

Takes: a base URL. Gives: the folder that keeps its root and what TUF's client has seen since, so
that a rollback is noticed. Never: trusts a root by itself; whoever calls has shown its fingerprint
to a person, or was given it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root

from rollart_core.errors import RegistryError
from rollart_registry.explain import explained
from rollart_registry.fetcher import fetcher_for
from rollart_registry.signed import parse
from rollart_registry.state import state_folder
from rollart_registry.tree import write_whole

ROOT_MAX_BYTES: Final = 512_000


@dataclass(frozen=True, slots=True)
class Trusted:
    """A registry somebody decided to trust."""

    base: str
    folder: Path
    """Holds ``root.json``, ``metadata/`` and ``wheels/``."""
    root: bytes
    root_version: int

    @property
    def fingerprint(self) -> str:
        """Of the root it was first trusted with."""
        return fingerprint(self.root)


def fingerprint(root: bytes) -> str:
    """Return what people compare: the SHA-256 (hex) of a root metadata file."""
    return hashlib.sha256(root).hexdigest()


def trusted(base: str) -> Trusted | None:
    """Return what was decided about a registry before; None: nothing yet.

    Raises:
        RegistryError: When what is kept about it cannot be read.
    """
    folder = _folder(base)
    if not (folder / "registry.json").is_file():
        return None
    try:
        root = (folder / "root.json").read_bytes()
        facts = json.loads((folder / "registry.json").read_text("utf-8"))
        return Trusted(base, folder, root, int(facts["root_version"]))
    except (OSError, ValueError, KeyError) as e:
        raise RegistryError(f"{folder} is damaged ({e}): remove it to trust {base} anew") from e


def all_trusted() -> list[Trusted]:
    """Return every registry this person trusts."""
    found = []
    for path in sorted(state_folder().glob("*/registry.json")):
        try:
            base = str(json.loads(path.read_text("utf-8"))["base"])
        except (OSError, ValueError, KeyError) as e:
            raise RegistryError(f"{path.parent} is damaged ({e}): remove it") from e
        known = trusted(base)
        if known is not None:
            found.append(known)
    return found


def trust(base: str, root: bytes) -> Trusted:
    """Trust a registry from now on, with this root.

    Raises:
        RegistryError: When the root is not signed by its own keys, or another is trusted already.
    """
    version = check_root(root)
    before = trusted(base)
    if before is not None:
        if before.root != root:
            raise RegistryError(
                f"{base} is trusted with the root {before.fingerprint}, not with "
                f"{fingerprint(root)}; remove {before.folder} if the registry was made anew"
            )
        return before
    folder = _folder(base)
    write_whole(folder / "root.json", root)
    facts = {"base": base, "root_version": version}
    write_whole(folder / "registry.json", json.dumps(facts, indent=2).encode())
    return Trusted(base, folder, root, version)


def offered_root(base: str, version: int = 1) -> bytes:
    """Return a version of the root as the registry offers it; nothing trusts it yet.

    Raises:
        RegistryError: When the registry is down, or is none.
    """
    url = f"{base}/metadata/{version}.root.json"
    with explained(base):
        return fetcher_for(base).download_bytes(url, ROOT_MAX_BYTES)


def check_root(root: bytes) -> int:
    """Check that root metadata is signed by its own keys; return its version.

    Raises:
        RegistryError: When it is not.
    """
    metadata: Metadata[Root] = parse(root, "root.json")
    try:
        metadata.signed.verify_delegate("root", metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError, AttributeError) as e:
        raise RegistryError("this root is not signed by its own keys: it is no registry's") from e
    return metadata.signed.version


def _folder(base: str) -> Path:
    readable = re.sub(r"[^a-z0-9]+", "-", base.partition("://")[2].lower()).strip("-")[-40:]
    digest = hashlib.sha256(base.encode()).hexdigest()[:12]
    return state_folder() / f"{readable}-{digest}"
