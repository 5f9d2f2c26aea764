"""Read a registry through ``tuf.ngclient``: only verified data is visible.

Takes: a trusted registry. Gives: owners, releases, wheels. Never: implements verification, shows
data that the client has not verified, or lists an id outside its owner's namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tuf.api.metadata import Metadata, Snapshot, Targets
from tuf.ngclient import Updater

from rollart_core.errors import RegistryError, did_you_mean
from rollart_registry.explain import explained
from rollart_registry.fetcher import fetcher_for
from rollart_registry.names import Wanted, owner_of_distribution
from rollart_registry.release import Release, release_of_target
from rollart_registry.signed import delegated_roles
from rollart_registry.tree import locked
from rollart_registry.trust import Trusted
from rollart_registry.wheel import Wheel, read_wheel


class RegistryClient:
    """One consistent, verified view of a registry; created by :func:`opened`."""

    def __init__(self, trusted: Trusted, updater: Updater) -> None:
        self.trusted = trusted
        self._updater = updater
        self._metadata = trusted.folder / "metadata"
        self._releases: dict[str, tuple[Release, ...]] = {}
        self.refused: dict[str, str] = {}
        """Owner -> reason, for owners whose metadata is expired, damaged or invalid."""

    @property
    def base(self) -> str:
        """The registry's base URL."""
        return self.trusted.base

    def targets(self) -> Targets:
        """Return the top-level targets, which delegate the namespaces."""
        return Metadata[Targets].from_file(str(self._metadata / "targets.json")).signed

    def owners(self) -> tuple[str, ...]:
        """Return the owners that may publish here."""
        return tuple(sorted(delegated_roles(self.targets())))

    def owner_targets(self, owner: str) -> Metadata[Targets] | None:
        """Return the metadata that an owner signed; None if there is none yet.

        Raises:
            RegistryError: If TUF's client refuses it.
        """
        snapshot = Metadata[Snapshot].from_file(str(self._metadata / "snapshot.json")).signed
        if f"{owner}.json" not in snapshot.meta:
            return None
        with explained(f"{self.base}: {owner}"):
            # Looking up any path of the owner makes the client fetch, verify and keep the role.
            self._updater.get_targetinfo(f"{owner}/-")
            return Metadata.from_file(str(self._metadata / f"{owner}.json"))

    def releases_of(self, owner: str) -> tuple[Release, ...]:
        """Return an owner's releases, oldest version first.

        Raises:
            RegistryError: If TUF's client refuses the owner's metadata, or the owner signed a name
                that belongs to another owner.
        """
        if owner not in self._releases:
            signed = self.owner_targets(owner)
            found = {} if signed is None else signed.signed.targets
            releases = [release_of_target(owner, target) for target in found.values()]
            self._check_distributions(owner, releases)
            self._releases[owner] = tuple(sorted(releases, key=lambda r: (r.distribution, r.order)))
        return self._releases[owner]

    def releases(self) -> tuple[Release, ...]:
        """Return the releases of all owners except those in :attr:`refused`."""
        found: list[Release] = []
        for owner in self.owners():
            try:
                found += self.releases_of(owner)
            except RegistryError as e:
                self.refused[owner] = str(e)
        return tuple(found)

    def owner_of(self, distribution: str) -> str | None:
        """Return the owner of a distribution here; such a one must not come from an index.

        Names also belong to owners whose metadata is refused.
        """
        owner = owner_of_distribution(distribution, self.owners())
        if owner is None:
            return None
        published = {release.distribution for release in self.releases()}
        return owner if distribution in published or owner in self.refused else None

    def _check_distributions(self, owner: str, releases: list[Release]) -> None:
        for release in releases:
            rightful = owner_of_distribution(release.distribution, self.owners())
            if rightful != owner:
                raise RegistryError(
                    f"{self.base}: {owner!r} published {release.distribution!r}, which belongs to "
                    f"{rightful!r}; report this to the operator"
                )

    def find(self, wanted: Wanted, *, allow_yanked: bool = False) -> Release:
        """Return the release of ``ID[@VERSION]``: the newest, unless a version is given.

        A yanked release is found only if its version is given or ``allow_yanked`` is set. A
        pre-release is found only if its version is given or there is no other release.

        Raises:
            RegistryError: If there is none.
        """
        if wanted.owner not in self.owners():
            near = did_you_mean(wanted.owner, self.owners())
            raise RegistryError(f"{self.base} has no owner {wanted.owner!r}.{near}")
        having = [r for r in self.releases_of(wanted.owner) if wanted.id in r.ids]
        if not having:
            ids = sorted({i for r in self.releases_of(wanted.owner) for i in r.ids})
            raise RegistryError(f"{self.base} has no {wanted.id!r}.{did_you_mean(wanted.id, ids)}")
        if wanted.version is not None:
            fitting = [r for r in having if r.order == Version(wanted.version)]
            listed = ", ".join(r.version for r in having)
            if not fitting:
                raise RegistryError(f"{wanted.id} has no version {wanted.version}; it has {listed}")
            return fitting[-1]
        return _newest(having, str(wanted.id), allow_yanked=allow_yanked)

    def find_distribution(self, name: str, specifier: SpecifierSet) -> Release:
        """Return the newest release of a distribution that satisfies a requirement.

        Raises:
            RegistryError: If there is none.
        """
        having = [r for r in self.releases() if r.distribution == name]
        fitting = [r for r in having if specifier.contains(r.order, prereleases=True)]
        return _newest(fitting, f"{name}{specifier}", allow_yanked=False)

    def wheel(self, release: Release) -> Wheel:
        """Return a release's wheel, downloaded and verified, and compared with its record.

        Raises:
            RegistryError: If TUF's client refuses it, or the record does not match it.
        """
        wheel = read_wheel(self.download(release.target, release.sha256))
        differs = release.disagreement(wheel)
        if differs:
            raise RegistryError(f"{differs}: {release.owner} signed a record that is not true")
        return wheel

    def download(self, target: str, sha256: str) -> Path:
        """Return a verified file, from the local cache or from the registry.

        Args:
            target: Its path in the registry.
            sha256: The expected hash, in addition to the one in the metadata.
        """
        with explained(f"{self.base}: {target}"):
            info = self._updater.get_targetinfo(target)
            if info is None:
                raise RegistryError(f"{self.base} has no {target}, or it is not from its owner")
            if info.hashes.get("sha256") != sha256:
                raise RegistryError(
                    f"{target}: {self.base} signed the hash {info.hashes.get('sha256')}, "
                    f"but {sha256} is expected"
                )
            # One folder per file, so that the wheel keeps its file name.
            path = self.trusted.folder / "wheels" / sha256 / Path(target).name
            kept = self._updater.find_cached_target(info, str(path))
            return Path(kept or self._updater.download_target(info, str(path)))


@contextmanager
def opened(trusted: Trusted) -> Iterator[RegistryClient]:
    """Refresh a registry's metadata and lock its state for this process.

    Raises:
        RegistryError: If the registry is unreachable, or TUF's client refuses its metadata.
    """
    with locked(trusted.folder):
        metadata = trusted.folder / "metadata"
        metadata.mkdir(exist_ok=True)
        with explained(trusted.base):
            updater = Updater(
                str(metadata),
                f"{trusted.base}/metadata/",
                target_base_url=f"{trusted.base}/targets/",
                fetcher=fetcher_for(trusted.base),
                bootstrap=trusted.root,
            )
            updater.refresh()
        yield RegistryClient(trusted, updater)


def _newest(releases: list[Release], name: str, *, allow_yanked: bool) -> Release:
    usable = [r for r in releases if allow_yanked or r.yanked is None]
    if not usable:
        yanked = [f"{r.version} ({r.yanked})" for r in releases if r.yanked is not None]
        reason = f": yanked are {', '.join(yanked)}; give a version to use one" if yanked else ""
        raise RegistryError(f"no version of {name} can be installed{reason}")
    final = [r for r in usable if not r.order.is_prerelease]
    return max(final or usable, key=lambda r: r.order)
