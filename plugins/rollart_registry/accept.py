"""Accept submissions: each one is checked first, then copied and signed by the operator.

Takes: an operator, folders that owners submitted. Gives: what was accepted, and what was refused
and why. Never: changes what clients see for a refused submission, or accepts a record that does not
match its wheel.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, TargetFile, Targets

from rollart_core.errors import RegistryError, RollartError, first_line
from rollart_registry.names import owner_of_distribution
from rollart_registry.operator import Operator
from rollart_registry.release import Release, release_of_target
from rollart_registry.signed import SignedState, read
from rollart_registry.submission import Check, Submission, submissions_in
from rollart_registry.tree import locked, write_whole
from rollart_registry.wheel import Wheel, read_wheel


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one submission."""

    owner: str
    added: tuple[Release, ...] = ()
    changed: tuple[Release, ...] = ()
    """Versions that were yanked or unyanked."""
    refused: str | None = None
    """Why the submission was refused; None if it was accepted."""


@dataclass(frozen=True, slots=True)
class _Checked:
    metadata: Metadata[Targets]
    outcome: Accepted
    wheels: tuple[tuple[Path, Release], ...]


def accept(
    operator: Operator, folder: Path | None = None, recheck: Check | None = None
) -> list[Accepted]:
    """Accept every valid submission, in one new state of the registry.

    Args:
        operator: Signs the new state.
        folder: The folder of submissions; None means the registry's own.
        recheck: Runs the conformance suite on every new wheel; None trusts the owner's report.

    Returns:
        One outcome per submission; refused submissions stay in the folder.

    Raises:
        RegistryError: If the registry or the folder does not exist.
    """
    tree = operator.tree
    if folder is not None:
        _check_folder(folder, tree.path)
    folder = folder or tree.submissions
    with operator.alone(), locked(folder):
        state = operator.state()
        outcomes, checked = [], []
        for submission in submissions_in(folder):
            try:
                one = _check(submission, state, recheck)
                _copy_wheels(operator, one)
            except Exception as e:  # one bad submission must not block others
                outcomes.append(Accepted(submission.owner, refused=_reason(submission, e)))
                continue
            outcomes.append(one.outcome)
            checked.append((submission, one))
        if checked:
            operator.publish(state, {s.owner: one.metadata for s, one in checked})
        for submission, _ in checked:
            shutil.rmtree(submission.folder, ignore_errors=True)
    return outcomes


def _check_folder(folder: Path, registry: Path) -> None:
    if not folder.is_dir():
        raise RegistryError(f"{folder} is not a folder: give --submissions a folder of submissions")
    if folder.resolve() == registry.resolve():
        raise RegistryError(f"{folder} is the registry itself: leave --submissions out")


def _reason(submission: Submission, error: Exception) -> str:
    """Return why a submission is refused, and how to submit again."""
    what = str(error) if isinstance(error, RollartError) else f"{type(error).__name__}: {error}"
    return (
        f"{'; '.join(what.splitlines())}; it stays in {submission.metadata_file}: "
        "the next submission builds on it, so remove that file to start over"
    )


def _check(submission: Submission, state: SignedState, recheck: Check | None) -> _Checked:
    owner = submission.owner
    if owner not in state.delegated:
        raise RegistryError(f"there is no owner {owner!r}: `rollart registry add-owner` adds one")
    metadata: Metadata[Targets] = read(submission.metadata_file)
    _check_signature(owner, metadata, state)
    before = state.owners[owner].signed if owner in state.owners else None
    _check_successor(owner, metadata.signed, before)
    old = before.targets if before else {}
    added, changed = [], []
    for path, target in metadata.signed.targets.items():
        if not path.startswith(f"{owner}/"):
            raise RegistryError(f"{owner!r} signed {path!r}, which is another owner's")
        release = release_of_target(owner, target)
        _check_rightful(release, state)
        if path not in old:
            added.append((submission.wheel_file(target), release))
        elif release != release_of_target(owner, old[path]):
            changed.append(_check_only_yank(release, release_of_target(owner, old[path])))
    _check_versions(metadata.signed, owner)
    for file, release in added:
        _check_wheel(file, release, recheck)
    outcome = Accepted(owner, tuple(release for _, release in added), tuple(changed))
    return _Checked(metadata, outcome, tuple(added))


def _check_signature(owner: str, metadata: Metadata[Any], state: SignedState) -> None:
    if not isinstance(metadata.signed, Targets):
        raise RegistryError(f"{owner!r} submitted {metadata.signed.type} metadata, not targets")
    try:
        state.targets.signed.verify_delegate(owner, metadata.signed_bytes, metadata.signatures)
    except RepositoryError as e:
        raise RegistryError(f"not signed by the key of {owner!r} ({first_line(str(e))})") from e


def _check_successor(owner: str, new: Targets, old: Targets | None) -> None:
    """Check that new metadata extends the old: a later version, nothing removed or replaced."""
    if new.delegations is not None:
        raise RegistryError(f"{owner!r} delegates to other roles: not allowed here")
    if new.is_expired():
        raise RegistryError(f"the signature of {owner!r} has expired; sign again")
    if old is None:
        return
    if new.version <= old.version:
        raise RegistryError(
            f"version {new.version} of {owner!r} is not newer than version {old.version} in the "
            "registry: publish again on top of it"
        )
    for path, target in old.targets.items():
        kept = new.targets.get(path)
        if kept is None or (kept.hashes, kept.length) != (target.hashes, target.length):
            what = "removes" if kept is None else "replaces"
            raise RegistryError(f"{owner!r} {what} {path!r}: a published version never changes")


def _check_rightful(release: Release, state: SignedState) -> None:
    rightful = owner_of_distribution(release.distribution, state.delegated)
    if rightful != release.owner:
        raise RegistryError(f"{release.distribution!r} belongs to {rightful!r}")


def _check_only_yank(new: Release, old: Release) -> Release:
    if new.with_yank(None) != old.with_yank(None):
        raise RegistryError(f"the record of {old} was changed: a published version never changes")
    return new


def _check_versions(signed: Targets, owner: str) -> None:
    releases = [release_of_target(owner, target) for target in signed.targets.values()]
    versions = [(release.distribution, release.order) for release in releases]
    for release in releases:
        if versions.count((release.distribution, release.order)) > 1:
            raise RegistryError(f"{owner!r} signed {release} twice: a version has one wheel")


def _check_wheel(file: Path, release: Release, recheck: Check | None) -> None:
    if not file.is_file():
        raise RegistryError(f"{release}: {file.name} is missing: the submission is incomplete")
    # Read it under its own name: the file name holds distribution and version.
    with TemporaryDirectory() as folder:
        named = Path(folder) / release.wheel
        named.symlink_to(file.resolve())
        wheel = read_wheel(named)
        _check_hash(wheel, release.as_target())
        differs = release.disagreement(wheel)
        if differs:
            raise RegistryError(differs)
        if not release.check.passed:
            raise RegistryError(f"{release} did not pass `rollart check`")
        if recheck is not None and not recheck(str(wheel.path))["passed"]:
            raise RegistryError(f"{release} fails `rollart check` here, but not for its owner")


def _check_hash(wheel: Wheel, target: TargetFile) -> None:
    if (wheel.sha256, wheel.length_bytes) != (target.hashes["sha256"], target.length):
        raise RegistryError(f"{wheel.name} is not the file that its owner signed")


def _copy_wheels(operator: Operator, checked: _Checked) -> None:
    for file, release in checked.wheels:
        to = operator.tree.target_file(release.owner, release.sha256, release.wheel)
        write_whole(to, file.read_bytes())
        # Ensure that the copied file is the checked file, even if the source changed in between.
        with to.open("rb") as copied:
            try:
                release.as_target().verify_length_and_hashes(copied)
            except RepositoryError as e:
                to.unlink()
                raise RegistryError(f"{release}: its file changed while it was copied") from e
