"""One published version: the record that an owner signs with the wheel's hash.

Takes: a wheel and its check report, or a target of signed metadata. Gives: :class:`Release`. Never:
trusts a record over the wheel: :meth:`Release.disagreement` names where they differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Final

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pydantic import TypeAdapter, ValidationError
from tuf.api.metadata import TargetFile

from rollart_core.contracts.spec import ID_PATTERN
from rollart_core.errors import RegistryError, first_line
from rollart_core.plugins.manager import GROUP
from rollart_registry.names import owner_of_distribution
from rollart_registry.wheel import Wheel

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Provided:
    """One plugin that a package provides."""

    kind: str
    id: str
    summary: str
    entry_point: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check result of the owner's run of the conformance suite."""

    id: str
    group: str
    name: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of the conformance suite, as the owner reported it."""

    passed: bool
    counts: dict[str, int]
    results: tuple[CheckResult, ...]

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> CheckReport:
        """Return the part of a report's JSON that is published; reasons keep their first line."""
        results = tuple(
            CheckResult(
                id=str(r["id"]),
                group=str(r.get("group", "")),
                name=str(r.get("name", "")),
                outcome=str(r["outcome"]),
                reason=first_line(str(r.get("reason") or ""), 200),
            )
            for r in report["results"]
        )
        counts = {str(k): int(v) for k, v in report["counts"].items()}
        return cls(bool(report["passed"]), counts, results)

    def __str__(self) -> str:
        known = [name for name in ("PASS", "FAIL", "SKIP") if name in self.counts]
        counts = ", ".join(f"{self.counts[name]} {name}" for name in known)
        return f"{'passed' if self.passed else 'FAILED'} ({counts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One version of one package."""

    distribution: str
    version: str
    wheel: str
    """The wheel's file name."""
    sha256: str
    length_bytes: int
    provides: tuple[Provided, ...]
    entry_points: tuple[tuple[str, str, str], ...]
    """(group, name, value)."""
    requires: tuple[str, ...]
    requires_python: str
    licence: str
    summary: str
    check: CheckReport
    published: str
    """UTC, such as ``2026-11-21T04:00:00Z``."""
    yanked: str | None = None
    """The reason of a yank; None if it is not yanked."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids it provides."""
        return tuple(p.id for p in self.provides)

    @property
    def owner(self) -> str:
        """The namespace of its ids, which is also the TUF role that signed it."""
        return self.provides[0].id.partition("/")[0]

    @property
    def needs(self) -> tuple[str, ...]:
        """Its requirements without those of its extras."""
        return tuple(text for text in self.requires if "extra ==" not in text)

    @property
    def target(self) -> str:
        """Its path in the registry."""
        return f"{self.owner}/{self.wheel}"

    @property
    def order(self) -> Version:
        """The sort key of releases of one package."""
        return Version(self.version)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        return {"owner": self.owner, **asdict(self)}

    def as_target(self) -> TargetFile:
        """Return the entry of the owner's metadata."""
        record = asdict(self)
        for known_to_tuf in ("sha256", "length_bytes", "wheel"):
            del record[known_to_tuf]
        extra = {"custom": {"release": record}}
        return TargetFile(self.length_bytes, {"sha256": self.sha256}, self.target, extra)

    def with_yank(self, reason: str | None) -> Release:
        """Return the same release, yanked for a reason, or not yanked (None)."""
        return replace(self, yanked=reason)

    def disagreement(self, wheel: Wheel) -> str | None:
        """Return a message on where the record and the wheel differ; None if nowhere."""
        true = release_of(wheel, self.owner, self.check, self.published)
        for name in Release.__dataclass_fields__:
            if name != "yanked" and getattr(self, name) != getattr(true, name):
                return f"the registry's record of {self} and the wheel differ in {name}"
        return None


@cache
def _adapter() -> TypeAdapter[Release]:
    return TypeAdapter(Release)


def release_of_target(owner: str, target: TargetFile) -> Release:
    """Return the release that an owner's signed metadata describes.

    Args:
        owner: The role that the target is in.
        target: Verified by TUF; its record is the owner's statement.

    Raises:
        RegistryError: If the record is malformed or uses names outside the owner's namespace.
    """
    folder, _, name = target.path.rpartition("/")
    custom = target.custom if isinstance(target.custom, dict) else {}
    record = custom.get("release")
    source = f"{owner} signed a malformed record for {target.path!r}"
    sha256 = target.hashes.get("sha256", "")
    if folder != owner or not isinstance(record, dict) or not _SHA256.fullmatch(sha256):
        raise RegistryError(source)
    facts = {"wheel": name, "sha256": sha256, "length_bytes": target.length}
    try:
        release = _adapter().validate_python(record | facts, strict=False)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise RegistryError(f"{source}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from e
    _check_file_name(release, source)
    check_names(release.provides, release.distribution, owner)
    return release


def _check_file_name(release: Release, source: str) -> None:
    """Check that the wheel's file name has the distribution and version of the record."""
    try:
        distribution, version, _, _ = parse_wheel_filename(release.wheel)
    except InvalidWheelFilename as e:
        raise RegistryError(f"{source}: {first_line(str(e))}") from e
    if (distribution, str(version)) != (release.distribution, release.version):
        raise RegistryError(f"{source}: the record is of {release}")


def release_of(wheel: Wheel, owner: str, check: CheckReport, published: str) -> Release:
    """Return the release for a wheel.

    Raises:
        RegistryError: If this owner may not publish the wheel.
    """
    if not any(group == GROUP for group, _, _ in wheel.entry_points):
        raise RegistryError(
            f"{wheel.name} has no entry point in the group {GROUP!r}: RollArt would not find it: "
            f'add [project.entry-points.{GROUP}] with NAME = "PACKAGE.plugin" to its pyproject.toml'
        )
    if not wheel.manifests:
        raise RegistryError(f"{wheel.name} holds no rollart.yaml: add one to its import package")
    provides = tuple(
        Provided(kind, spec.id, spec.summary, spec.entry_point)
        for manifest in wheel.manifests.values()
        for kind, specs in sorted(manifest.specs.items())
        for spec in specs
    )
    check_names(provides, wheel.distribution, owner)
    _check_code_is_inside(wheel, provides)
    licences = sorted({manifest.licence for manifest in wheel.manifests.values()})
    return Release(
        distribution=wheel.distribution,
        version=wheel.version,
        wheel=wheel.name,
        sha256=wheel.sha256,
        length_bytes=wheel.length_bytes,
        provides=provides,
        entry_points=wheel.entry_points,
        requires=wheel.requires,
        requires_python=wheel.requires_python,
        licence=" AND ".join(licences) or wheel.licence,
        summary=wheel.summary,
        check=check,
        published=published,
    )


def check_names(provides: tuple[Provided, ...], distribution: str, owner: str) -> None:
    """Check that ids and distribution are in an owner's namespace.

    Raises:
        RegistryError: If one is not; names the first.
    """
    if not provides:
        raise RegistryError(f"{distribution} provides nothing: its rollart.yaml lists no id")
    for provided in provides:
        found = ID_PATTERN.match(provided.id)
        if found is None or found["namespace"] != owner:
            raise RegistryError(
                f"{distribution} provides {provided.id!r}, which is outside of the namespace "
                f"{owner!r}: an owner publishes ids that begin with {owner}/"
            )
    if owner_of_distribution(distribution, [owner]) is None:
        raise RegistryError(
            f"distribution {distribution!r} does not begin with its owner's name: "
            f"name it {owner}, or a name that begins with {owner}-"
        )


def _check_code_is_inside(wheel: Wheel, provides: tuple[Provided, ...]) -> None:
    modules = [(p.id, p.entry_point) for p in provides]
    modules += [(name, value) for group, name, value in wheel.entry_points if group == GROUP]
    for name, value in modules:
        package = value.partition(":")[0].split(".")[0].strip()
        if package not in wheel.packages:
            raise RegistryError(
                f"{wheel.name}: {name!r} is in {value!r}, but the wheel holds no {package!r}"
            )
