"""The registries that the user trusts, each with the root of the first use.

Takes: a base URL. Gives: the folder with its root and the state of TUF's client, which detects
rollbacks. Never: trusts a root without confirmation; the caller has shown its fingerprint to the
user, or was given it.
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
    """A registry that the user decided to trust."""

    base: str
    folder: Path
    """Holds ``root.json``, ``metadata/`` and ``wheels/``."""
    root: bytes
    root_version: int

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the root that was trusted first."""
        return fingerprint(self.root)


def fingerprint(root: bytes) -> str:
    """Return the SHA-256 (hex) of a root metadata file, which users compare."""
    return hashlib.sha256(root).hexdigest()


def trusted(base: str) -> Trusted | None:
    """Return a registry if it is trusted already; None if it is new.

    Raises:
        RegistryError: If its stored state cannot be read.
    """
    folder = _folder(base)
    if not (folder / "registry.json").is_file():
        return None
    try:
        root = (folder / "root.json").read_bytes()
        facts = json.loads((folder / "registry.json").read_text("utf-8"))
        return Trusted(base, folder, root, int(facts["root_version"]))
    except (OSError, ValueError, KeyError) as e:
        raise RegistryError(f"{folder} is damaged ({e}): remove it to trust {base} again") from e


def all_trusted() -> list[Trusted]:
    """Return every registry that the user trusts."""
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
        RegistryError: If the root is not signed by its own keys, or another is trusted already.
    """
    version = check_root(root)
    before = trusted(base)
    if before is not None:
        if before.root != root:
            raise RegistryError(
                f"{base} is trusted with the root {before.fingerprint}, not with "
                f"{fingerprint(root)}; remove {before.folder} if the registry was recreated"
            )
        return before
    folder = _folder(base)
    write_whole(folder / "root.json", root)
    facts = {"base": base, "root_version": version}
    write_whole(folder / "registry.json", json.dumps(facts, indent=2).encode())
    return Trusted(base, folder, root, version)


def offered_root(base: str, version: int = 1) -> bytes:
    """Return a version of the registry's root, which is not trusted yet.

    Raises:
        RegistryError: If the registry is unreachable, or not a registry.
    """
    url = f"{base}/metadata/{version}.root.json"
    with explained(base):
        return fetcher_for(base).download_bytes(url, ROOT_MAX_BYTES)


def check_root(root: bytes) -> int:
    """Check that root metadata is signed by its own keys; return its version.

    Raises:
        RegistryError: If it is not.
    """
    metadata: Metadata[Root] = parse(root, "root.json")
    try:
        metadata.signed.verify_delegate("root", metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError, AttributeError) as e:
        raise RegistryError("this root is not signed by its own keys: it is invalid") from e
    return metadata.signed.version


def _folder(base: str) -> Path:
    readable = re.sub(r"[^a-z0-9]+", "-", base.partition("://")[2].lower()).strip("-")[-40:]
    digest = hashlib.sha256(base.encode()).hexdigest()[:12]
    return state_folder() / f"{readable}-{digest}"
