"""The operator's side: create a registry, delegate namespaces, sign and publish metadata.

Takes: a folder for the registry and a separate one for the keys. Gives: new signed versions of
root, targets, snapshot and timestamp (the timestamp is written last, so that a reader sees the old
state or the new one), and static HTML pages of the registry. Never: signs on top of a folder that
differs from the last version it signed, or writes a package's text to a page unescaped.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from securesystemslib.signer import CryptoSigner, SSlibKey
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    Targets,
    Timestamp,
)

from rollart_core.errors import RegistryError, first_line
from rollart_registry.client import RegistryClient
from rollart_registry.fetcher import local_folder
from rollart_registry.keys import Ask, load_signer, make_key
from rollart_registry.names import check_owner, owner_of_distribution
from rollart_registry.release import Release, release_of_target
from rollart_registry.signed import SignedState, load_state
from rollart_registry.tree import RegistryTree, locked, write_whole

ONLINE_ROLES: Final = ("targets", "snapshot", "timestamp")
_POLICY: Final = "policy.json"


@dataclass(frozen=True, slots=True)
class Validity:
    """The number of days until a signature of each role expires."""

    root: float = 365.0
    targets: float = 365.0
    snapshot: float = 30.0
    timestamp: float = 7.0

    def until(self, role: str, now: datetime) -> datetime:
        """Return when a signature made now expires."""
        return now + timedelta(days=getattr(self, role))


@dataclass(slots=True)
class Operator:
    """Holds the operator's keys and signs one registry."""

    tree: RegistryTree
    keys: Path
    """The folder of private keys, the trusted root and the last signed state."""
    ask: Ask | None = None
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the registry's lock.

        Raises:
            RegistryError: If there is no registry; no folder is created then.
        """
        self._check_there()
        with locked(self.tree.path):
            yield

    def state(self) -> SignedState:
        """Return the verified state of the folder.

        Raises:
            RegistryError: If it is not the state that this operator signed last.
        """
        self._check_there()
        root = self.keys / "root.json"
        if not root.is_file():
            raise RegistryError(f"{self.keys} has no root.json: give the folder that init created")
        state = load_state(self.tree, root.read_bytes())
        signed, found = self._policy()["timestamp_version"], state.timestamp.signed.version
        if found < signed:
            raise RegistryError(
                f"{self.tree.path} was rolled back: its timestamp is version {found}, but the last "
                f"signed version is {signed}; restore the newer files"
            )
        _check_wheels(self.tree, state)
        return state

    def signer(self, role: str) -> CryptoSigner:
        """Return the signer of a role other than root."""
        return load_signer(self.keys / role, self.ask)

    def sign_targets(self, state: SignedState, delegations: Delegations) -> Metadata[Targets]:
        """Return new top-level metadata with these delegations."""
        expires = self.validity().until("targets", self.now)
        version = state.targets.signed.version + 1
        return self.signed(Targets(version, expires=expires, delegations=delegations), "targets")

    def signed(self, payload: Any, role: str) -> Metadata[Any]:
        """Return a payload signed by the key of a role other than root."""
        metadata: Metadata[Any] = Metadata(payload)
        metadata.sign(self.signer(role))
        return metadata

    def publish(self, state: SignedState, changed: Mapping[str, Metadata[Targets]]) -> None:
        """Write new versions of some roles, then snapshot and timestamp on top of them.

        Args:
            state: The current state of the folder.
            changed: Role (an owner, or ``targets``) -> its new metadata.
        """
        for role, metadata in changed.items():
            write_whole(self.tree.role_file(role, metadata.signed.version), metadata.to_bytes())
        metas = dict(state.snapshot.signed.meta)
        for role, metadata in changed.items():
            metas[f"{role}.json"] = MetaFile.from_data(
                metadata.signed.version, metadata.to_bytes(), ["sha256"]
            )
        version = state.snapshot.signed.version + 1
        self.publish_snapshot(version, state.timestamp.signed.version + 1, metas)

    def refresh(self, *, snapshot: bool = True) -> datetime:
        """Sign the timestamp (and the snapshot) again, to extend their validity.

        Returns:
            When the new timestamp expires.
        """
        with self.alone():
            state = self.state()
            if snapshot:
                self.publish(state, {})
            else:
                self._publish_timestamp(state.timestamp.signed.version + 1, state.snapshot)
            return self.validity().until("timestamp", self.now)

    def refresh_targets(self) -> None:
        """Sign the top-level targets again, with snapshot and timestamp."""
        with self.alone():
            state = self.state()
            delegations = state.targets.signed.delegations or Delegations({}, {})
            self.publish(state, {"targets": self.sign_targets(state, delegations)})

    def refresh_root(self) -> None:
        """Sign root again as its next version."""
        with self.alone():
            state = self.state()
            root = state.root.signed
            root.version += 1
            root.expires = self.validity().until("root", self.now)
            self.write_root(root)

    def add_owner(self, name: str, keys: Sequence[SSlibKey], *, update: bool = False) -> None:
        """Delegate the namespace ``name`` to the holders of ``keys``.

        Args:
            name: The owner's name.
            keys: Public keys; any one of them can sign for the owner.
            update: Replace the keys of an existing owner.

        Raises:
            RegistryError: If the name is taken or malformed, or a distribution of another owner
                would belong to the new one; for an update, if none of the new keys signed the
                published metadata.
        """
        with self.alone():
            state = self.state()
            roles = dict(state.delegated)
            if not update:
                check_owner(name, roles)
                _check_takes_no_name(state, name)
            elif name not in roles:
                raise RegistryError(f"there is no owner {name!r} to update")
            targets = state.targets.signed
            targets.delegations = targets.delegations or Delegations({}, {})
            assert targets.delegations.roles is not None
            keyids = [key.keyid for key in keys]
            role = DelegatedRole(name, keyids, 1, terminating=True, paths=[f"{name}/*"])
            targets.delegations.roles[name] = role
            known = targets.delegations.keys | {key.keyid: key for key in keys}
            used = {keyid for r in targets.delegations.roles.values() for keyid in r.keyids}
            targets.delegations.keys = {keyid: known[keyid] for keyid in sorted(used)}
            _check_still_signed(state, name)
            self.publish(state, {"targets": self.sign_targets(state, targets.delegations)})

    def _check_there(self) -> None:
        if not self.tree.exists:
            raise RegistryError(f"{self.tree.path} is not a registry: use `rollart registry init`")

    def _policy(self) -> dict[str, Any]:
        path = self.keys / _POLICY
        try:
            policy: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as e:
            raise RegistryError(f"cannot read {path} ({e}): restore it from a backup") from e
        return policy

    def validity(self) -> Validity:
        """Return the validity of signatures."""
        days = self._policy()["days"]
        return Validity(**{f.name: float(days[f.name]) for f in fields(Validity)})

    def set_validity(self, days: Mapping[str, float]) -> None:
        """Change the validity of new signatures; role -> days."""
        if not days:
            return
        with self.alone():
            policy = self._policy()
            policy["days"] |= days
            write_whole(self.keys / _POLICY, json.dumps(policy, indent=2).encode())

    def publish_snapshot(
        self, version: int, timestamp_version: int, metas: dict[str, MetaFile]
    ) -> None:
        """Write a snapshot of these versions, and a timestamp for it."""
        expires = self.validity().until("snapshot", self.now)
        snapshot = self.signed(Snapshot(version, expires=expires, meta=metas), "snapshot")
        write_whole(self.tree.role_file("snapshot", version), snapshot.to_bytes())
        self._publish_timestamp(timestamp_version, snapshot)

    def _publish_timestamp(self, version: int, snapshot: Metadata[Snapshot]) -> None:
        meta = MetaFile.from_data(snapshot.signed.version, snapshot.to_bytes(), ["sha256"])
        expires = self.validity().until("timestamp", self.now)
        timestamp = self.signed(
            Timestamp(version, expires=expires, snapshot_meta=meta), "timestamp"
        )
        write_whole(self.tree.role_file("timestamp", version), timestamp.to_bytes())
        policy = self._policy() | {"timestamp_version": version}
        write_whole(self.keys / _POLICY, json.dumps(policy, indent=2).encode())

    def write_root(self, root: Root) -> None:
        """Sign root with all of its keys, and write it for clients and for this operator."""
        metadata: Metadata[Root] = Metadata(root)
        for path in root_key_files(self.keys):
            metadata.sign(load_signer(path, self.ask), append=True)
        try:
            root.verify_delegate("root", metadata.signed_bytes, metadata.signatures)
        except RepositoryError as e:
            reason = f"{self.keys} holds too few keys of root ({first_line(str(e))})"
            raise RegistryError(f"{reason}: copy the other keys there, to sign with all") from e
        write_whole(self.tree.role_file("root", root.version), metadata.to_bytes())
        write_whole(self.keys / "root.json", metadata.to_bytes())


def init(
    operator: Operator,
    *,
    passphrase: str | None,
    root_keys: int = 1,
    root_threshold: int = 1,
    validity: Validity | None = None,
) -> bytes:
    """Create the keys and an empty registry.

    Args:
        operator: Has the paths of the two folders; both must be empty or missing.
        passphrase: Encrypts the private keys; None means no encryption.
        root_keys: Number of root keys.
        root_threshold: Number of keys that must sign root.
        validity: Days until signatures expire.

    Returns:
        The root metadata; clients compare its fingerprint.

    Raises:
        RegistryError: If a folder is not empty, or the numbers of keys are invalid.
    """
    tree, keys = operator.tree, operator.keys
    if not 1 <= root_threshold <= root_keys:
        raise RegistryError(f"root threshold {root_threshold} must be from 1 to {root_keys} (keys)")
    if keys.resolve().is_relative_to(tree.path.resolve()):
        raise RegistryError(f"{keys} is inside {tree.path}: private keys would be served")
    for folder in (tree.path, keys):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RegistryError(f"{folder} exists and is not empty: give a new folder")
    operator.ask = lambda _: passphrase or ""
    try:
        return _init(operator, passphrase, root_keys, root_threshold, validity or Validity())
    except BaseException:
        for folder in (tree.path, keys):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _init(
    operator: Operator,
    passphrase: str | None,
    root_keys: int,
    root_threshold: int,
    validity: Validity,
) -> bytes:
    keys = operator.keys
    keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys.chmod(0o700)
    days = asdict(validity)
    policy = {"days": days, "timestamp_version": 0}
    write_whole(keys / _POLICY, json.dumps(policy, indent=2).encode())
    expires = validity.until("root", operator.now)
    root = Root(1, expires=expires, consistent_snapshot=True)
    for number in range(1, root_keys + 1):
        root.add_key(make_key(keys / f"root{number}", passphrase), "root")
    root.roles["root"].threshold = root_threshold
    for role in ONLINE_ROLES:
        root.add_key(make_key(keys / role, passphrase), role)
    return _write_first(operator, root)


def root_key_files(keys: Path) -> list[Path]:
    """Return the private keys of root in a folder."""
    return sorted(path for path in keys.glob("root*") if not path.suffix)


def _write_first(operator: Operator, root: Root) -> bytes:
    """Write the first version of every role."""
    operator.write_root(root)
    until = operator.validity().until("targets", operator.now)
    empty = Targets(1, expires=until, delegations=Delegations({}, {}))
    targets = operator.signed(empty, "targets")
    write_whole(operator.tree.role_file("targets", 1), targets.to_bytes())
    metas = {"targets.json": MetaFile.from_data(1, targets.to_bytes(), ["sha256"])}
    operator.tree.targets.mkdir(parents=True, exist_ok=True)
    operator.publish_snapshot(1, 1, metas)
    return operator.tree.role_file("root", 1).read_bytes()


def _check_wheels(tree: RegistryTree, state: SignedState) -> None:
    """Check that the folder's wheels are those that their owners signed."""
    for owner, metadata in state.owners.items():
        for path, target in metadata.signed.targets.items():
            name = path.rpartition("/")[2]
            file = tree.target_file(owner, target.hashes.get("sha256", ""), name)
            try:
                with file.open("rb") as wheel:
                    target.verify_length_and_hashes(wheel)
            except OSError as e:
                message = f"cannot read {file}: {e.strerror}; restore the signed wheel"
                raise RegistryError(message) from e
            except RepositoryError as e:
                raise RegistryError(
                    f"{file} is not the file that {owner!r} signed ({first_line(str(e))}): "
                    "restore the signed wheel"
                ) from e


def _check_takes_no_name(state: SignedState, name: str) -> None:
    """Refuse a new owner if published packages of other owners would belong to it."""
    owners = [*state.delegated, name]
    for other, metadata in state.owners.items():
        for target in metadata.signed.targets.values():
            release = release_of_target(other, target)
            if owner_of_distribution(release.distribution, owners) == name:
                raise RegistryError(
                    f"owner {name!r}: {other!r} has published {release.distribution!r}, which "
                    f"would belong to {name!r}, and all of {other!r} would be refused; "
                    "choose another name"
                )


def _check_still_signed(state: SignedState, owner: str) -> None:
    """Refuse new keys if none of them signed the owner's published metadata."""
    published = state.owners.get(owner)
    if published is None:
        return
    try:
        state.targets.signed.verify_delegate(owner, published.signed_bytes, published.signatures)
    except RepositoryError:
        raise RegistryError(
            f"releases of {owner!r} are signed by none of the new keys, so nobody could "
            "install them: give the old key too, let the owner publish with the new key, "
            "then remove the old key"
        ) from None


SITE_MARK: Final = ".rollart-site"


def build_site(client: RegistryClient, out: Path, title: str) -> list[Path]:
    """Write the pages of a registry.

    Args:
        client: The registry.
        out: A folder that does not exist, is empty, or holds an older site.
        title: Title of the pages.

    Returns:
        The paths of the pages. Raises:
        RegistryError: If the folder holds other files, or cannot be written.
    """
    if out.exists() and (
        not out.is_dir() or (any(out.iterdir()) and not (out / SITE_MARK).exists())
    ):
        raise RegistryError(f"{out} holds something else than a site: give a new folder")
    pages = _pages(client, title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            new = Path(folder) / "site"
            new.mkdir()
            (new / SITE_MARK).touch()
            for name, html in pages.items():
                (new / name).write_text(html, "utf-8")
            if out.exists():
                shutil.move(out, Path(folder) / "old")
            shutil.move(new, out)
    except OSError as e:
        raise RegistryError(f"cannot write {out}: {e.strerror}") from e
    return [out / name for name in pages]


def _pages(client: RegistryClient, title: str) -> dict[str, str]:
    environment = Environment(
        loader=PackageLoader("rollart_registry", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    packages: defaultdict[str, list[Release]] = defaultdict(list)
    for release in client.releases():
        packages[release.distribution].append(release)
    where = client.base if local_folder(client.base) is None else None
    common: dict[str, Any] = {
        "title": title,
        "registry": where or "URL",
        "fingerprint": client.trusted.fingerprint,
    }
    newest = [_shown_first(releases) for _, releases in sorted(packages.items())]
    index = environment.get_template("index.html.jinja")
    pages = {"index.html": index.render(releases=newest, refused=client.refused, **common)}
    package = environment.get_template("package.html.jinja")
    for release in newest:
        releases = packages[release.distribution][::-1]
        name = f"{release.distribution}.html"
        pages[name] = package.render(release=release, releases=releases, **common)
    return pages


def _shown_first(releases: list[Release]) -> Release:
    usable = [r for r in releases if r.yanked is None] or releases
    return max(usable, key=lambda r: (not r.order.is_prerelease, r.order))
