"""Read the signed state of a registry's folder, to sign the next state on top of it.

Takes: a folder and a trusted root. Gives: :class:`SignedState`. Never: serves clients
(:mod:`rollart_registry.client` uses ``tuf.ngclient``). Expiry is not checked here, because an
operator must be able to refresh expired metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    DelegatedRole,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    Targets,
    Timestamp,
)

from rollart_core.errors import RegistryError, first_line
from rollart_registry.tree import RegistryTree

SignedT = TypeVar("SignedT", Root, Timestamp, Snapshot, Targets)


@dataclass(frozen=True, slots=True)
class SignedState:
    """All metadata of a registry, each verified by the role above it."""

    root: Metadata[Root]
    timestamp: Metadata[Timestamp]
    snapshot: Metadata[Snapshot]
    targets: Metadata[Targets]
    owners: Mapping[str, Metadata[Targets]]
    """Owner -> metadata, for owners that have published."""

    @property
    def delegated(self) -> Mapping[str, DelegatedRole]:
        """Owner -> the role that was delegated to it."""
        return delegated_roles(self.targets.signed)


def delegated_roles(targets: Targets) -> Mapping[str, DelegatedRole]:
    """Return the owners that the operator delegated a namespace to."""
    delegations = targets.delegations
    return dict(delegations.roles or {}) if delegations else {}


def load_state(tree: RegistryTree, root: bytes) -> SignedState:
    """Read and verify the folder's metadata.

    Args:
        tree: The folder.
        root: Trusted root metadata, from the operator's own key folder.

    Raises:
        RegistryError: If a file is missing, malformed, or not signed by the right keys.
    """
    trusted: Metadata[Root] = parse(root, "root.json")
    _verify(trusted, trusted, "root")
    timestamp: Metadata[Timestamp] = read(tree.role_file("timestamp", 0))
    _verify(trusted, timestamp, "timestamp")
    snapshot_meta = timestamp.signed.snapshot_meta
    snapshot: Metadata[Snapshot] = _read_role(tree, "snapshot", snapshot_meta)
    _verify(trusted, snapshot, "snapshot")
    metas = snapshot.signed.meta
    targets: Metadata[Targets] = _read_role(tree, "targets", metas["targets.json"])
    _verify(trusted, targets, "targets")
    owners: dict[str, Metadata[Targets]] = {}
    for owner in delegated_roles(targets.signed):
        if f"{owner}.json" in metas:
            owners[owner] = _read_role(tree, owner, metas[f"{owner}.json"])
            _verify(targets, owners[owner], owner)
    return SignedState(trusted, timestamp, snapshot, targets, owners)


def read(path: Path) -> Metadata[Any]:
    """Return the metadata in a file, not yet verified.

    Raises:
        RegistryError: If it is missing or malformed.
    """
    try:
        return parse(path.read_bytes(), path.name)
    except OSError as e:
        message = f"cannot read {path}: {e.strerror}: it is half written, or not a registry"
        raise RegistryError(message) from e


def parse(data: bytes, name: str) -> Metadata[Any]:
    """Return metadata from bytes, not yet verified.

    Raises:
        RegistryError: If it is malformed.
    """
    try:
        return Metadata.from_bytes(data)
    except RepositoryError as e:
        raise RegistryError(f"{name} is not TUF metadata: {first_line(str(e))}") from e


def _read_role(tree: RegistryTree, role: str, meta: MetaFile) -> Metadata[Any]:
    path = tree.role_file(role, meta.version)
    found = read(path)
    try:
        meta.verify_length_and_hashes(path.read_bytes())
    except RepositoryError as e:
        raise RegistryError(f"{path.name} is not what was signed: {first_line(str(e))}") from e
    if found.signed.version != meta.version:
        raise RegistryError(f"{path.name} holds another version, {found.signed.version}")
    return found


def _verify(delegator: Metadata[Any], found: Metadata[Any], role: str) -> None:
    try:
        delegator.signed.verify_delegate(role, found.signed_bytes, found.signatures)
    except (RepositoryError, ValueError) as e:
        raise RegistryError(f"{role}.json: {first_line(str(e))}, not by its required keys") from e
