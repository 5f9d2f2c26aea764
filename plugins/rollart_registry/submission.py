"""The owner's side: a submission is the owner's next metadata and the wheels it adds.

Takes: a verified view of the registry, the owner's key, a checked wheel. Gives: a folder for the
operator to accept: ``OWNER.json`` and ``SHA256.NAME.whl``. Never: changes what clients see, or
leaves metadata that names a missing file: the metadata is written last, atomically.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, TargetFile, Targets

from rollart_core.errors import RegistryError
from rollart_registry.client import RegistryClient
from rollart_registry.names import OWNER_PATTERN, Wanted, owner_of_distribution
from rollart_registry.release import CheckReport, Release, release_of, release_of_target
from rollart_registry.signed import delegated_roles, read
from rollart_registry.tree import locked, write_whole
from rollart_registry.wheel import Wheel

Check = Callable[[str], Mapping[str, Any]]
"""Runs the conformance suite on a wheel and returns its report's JSON."""

OWNER_DAYS: Final = 365.0
"""The default number of days until an owner's signature expires."""


@dataclass(slots=True)
class Owner:
    """An owner that publishes: a key, and the folder for submissions."""

    name: str
    signer: CryptoSigner
    submissions: Path
    """The folder of the registry's submissions, or one to send to the operator."""
    days: float = OWNER_DAYS
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def folder(self) -> Path:
        """The folder of this owner's submission."""
        return self.submissions / self.name

    @property
    def waiting(self) -> Path:
        """The file of the owner's submitted metadata, which is not accepted yet."""
        return self.folder / f"{self.name}.json"


def owner_of_key(client: RegistryClient, signer: CryptoSigner, name: str | None = None) -> str:
    """Return the owner that a key signs for.

    Args:
        client: The registry.
        signer: The key.
        name: The expected owner; None means the only one of this key.

    Raises:
        RegistryError: If the registry delegated no such namespace to this key.
    """
    roles = delegated_roles(client.targets())
    holding = [owner for owner, role in roles.items() if signer.public_key.keyid in role.keyids]
    if name is not None and name not in roles:
        raise RegistryError(f"{client.base} has no owner {name!r}; its operator can add one")
    if name is not None and name not in holding:
        raise RegistryError(f"this key does not sign for {name!r}: use a key of that owner")
    if not holding:
        raise RegistryError(f"{client.base} delegated nothing to this key; its operator can do so")
    if name is None and len(holding) > 1:
        raise RegistryError(f"this key signs for {', '.join(holding)}: choose one with --owner")
    return name or holding[0]


def publish(client: RegistryClient, owner: Owner, wheel: Wheel, check: Check) -> Release:
    """Check a wheel and submit it.

    Args:
        client: The verified registry.
        owner: The owner that publishes.
        wheel: The wheel to publish.
        check: The conformance suite; a wheel that fails it is refused.

    Raises:
        RegistryError: If the wheel is refused; then nothing was submitted.
    """
    published = owner.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    unchecked = CheckReport(False, {}, ())
    release_of(wheel, owner.name, unchecked, published)  # do not run a wheel of another owner
    _check_new(client, owner, wheel)
    report = CheckReport.from_json(check(str(wheel.path)))
    if not report.passed:
        failed = [f"{r.id}: {r.name}: {r.reason}" for r in report.results if r.outcome == "FAIL"]
        raise RegistryError(f"{wheel.name} fails `rollart check`: {'; '.join(failed)}")
    release = release_of(wheel, owner.name, report, published)
    with locked(owner.submissions):
        signed = _check_new(client, owner, wheel)
        signed.targets[release.target] = release.as_target()
        owner.folder.mkdir(parents=True, exist_ok=True)
        _copy_whole(wheel, owner.folder / f"{release.sha256}.{release.wheel}")
        _hand_in(owner, signed)
    return release


def yank(client: RegistryClient, owner: Owner, wanted: Wanted, reason: str | None) -> list[Release]:
    """Submit that a version is yanked for a reason, or no longer yanked (None).

    Raises:
        RegistryError: If there is no such version.
    """
    with locked(owner.submissions):
        signed = _latest(client, owner)
        changed = []
        for path, target in list(signed.targets.items()):
            release = release_of_target(owner.name, target)
            if wanted.id in release.ids and str(release.order) == wanted.version:
                changed.append(release.with_yank(reason))
                signed.targets[path] = changed[-1].as_target()
        if not changed:
            raise RegistryError(f"{owner.name} has not published {wanted}")
        _hand_in(owner, signed)
    return changed


def renew(client: RegistryClient, owner: Owner) -> None:
    """Submit the same releases, signed again, before the owner's signature expires."""
    with locked(owner.submissions):
        _hand_in(owner, _latest(client, owner))


def _check_new(client: RegistryClient, owner: Owner, wheel: Wheel) -> Targets:
    """Return the owner's last signed metadata, which must not have this version yet."""
    signed = _latest(client, owner)
    live = client.owner_targets(owner.name)
    published = live.signed.targets if live else {}
    rightful = owner_of_distribution(wheel.distribution, client.owners())
    if rightful != owner.name:
        raise RegistryError(f"{wheel.distribution!r} belongs to {rightful!r}; choose another")
    for path, target in signed.targets.items():
        release = release_of_target(owner.name, target)
        if (release.distribution, release.version) == (wheel.distribution, wheel.version):
            if path not in published:
                raise RegistryError(
                    f"{release} is submitted already, but not accepted: to replace it, remove "
                    f"{owner.waiting}, and submit its other releases again"
                )
            raise RegistryError(
                f"{release} is published already, and a version never changes: raise the version "
                "in pyproject.toml"
            )
    return signed


def _latest(client: RegistryClient, owner: Owner) -> Targets:
    """Return the owner's last signed metadata: the pending submission, else the registry's."""
    live = client.owner_targets(owner.name)
    current = live.signed if live else Targets(version=1)
    if live is None:
        current.version = 0
    if not owner.waiting.is_file():
        return current
    found: Metadata[Targets] = read(owner.waiting)
    try:
        client.targets().verify_delegate(owner.name, found.signed_bytes, found.signatures)
    except (RepositoryError, ValueError) as e:
        message = f"{owner.waiting} is not signed by {owner.name!r}: remove it"
        raise RegistryError(message) from e
    return found.signed if found.signed.version > current.version else current


def _hand_in(owner: Owner, signed: Targets) -> None:
    signed.version += 1
    signed.expires = owner.now + timedelta(days=owner.days)
    metadata: Metadata[Targets] = Metadata(signed)
    metadata.sign(owner.signer)
    write_whole(owner.waiting, metadata.to_bytes())


def _copy_whole(wheel: Wheel, to: Path) -> None:
    """Copy a wheel atomically."""
    if to.exists():
        return
    partial = to.with_name(f".new-{to.name}")
    try:
        shutil.copyfile(wheel.path, partial)
        partial.replace(to)
    except OSError as e:
        raise RegistryError(f"cannot write {to}: {e.strerror}") from e
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission of an owner."""

    owner: str
    folder: Path

    @property
    def metadata_file(self) -> Path:
        """The owner's metadata."""
        return self.folder / f"{self.owner}.json"

    def wheel_file(self, target: TargetFile) -> Path:
        """Return the path of a wheel that the submission adds."""
        name = target.path.rpartition("/")[2]
        return self.folder / f"{target.hashes.get('sha256')}.{name}"


def submissions_in(folder: Path) -> list[Submission]:
    """Return the submissions in a folder; those without metadata are left out."""
    owners = sorted(path.name for path in folder.glob("*") if path.is_dir())
    found = [Submission(name, folder / name) for name in owners if OWNER_PATTERN.fullmatch(name)]
    return [submission for submission in found if submission.metadata_file.is_file()]
