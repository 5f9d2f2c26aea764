"""The files of a registry: their paths, and atomic writes.

    metadata/timestamp.json  N.snapshot.json  N.targets.json  N.root.json  N.OWNER.json
    targets/OWNER/SHA256.NAME.whl
    submissions/OWNER/OWNER.json, SHA256.NAME.whl    submitted by owners; not trusted yet

Takes: a folder. Gives: paths, atomically written files, a lock. Never: signs or verifies.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollart_core.errors import RegistryError


@dataclass(frozen=True, slots=True)
class RegistryTree:
    """The folder of a registry."""

    path: Path

    @property
    def metadata(self) -> Path:
        """The folder of signed metadata."""
        return self.path / "metadata"

    @property
    def targets(self) -> Path:
        """The folder of wheels."""
        return self.path / "targets"

    @property
    def submissions(self) -> Path:
        """The folder of the owners' submissions."""
        return self.path / "submissions"

    @property
    def exists(self) -> bool:
        """Whether the folder holds a registry."""
        return (self.metadata / "1.root.json").is_file()

    def role_file(self, role: str, version: int) -> Path:
        """Return the path of one version of a role's metadata; a timestamp has one version."""
        name = "timestamp.json" if role == "timestamp" else f"{version}.{role}.json"
        return self.metadata / name

    def target_file(self, owner: str, sha256: str, name: str) -> Path:
        """Return the path of a wheel, by TUF's rule for consistent snapshots."""
        return self.targets / owner / f"{sha256}.{name}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one, also after a power cut.

    Raises:
        RegistryError: If it cannot be written; the old file is unchanged.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise RegistryError(f"cannot write {path}: {e.strerror}") from e


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: a second process waits until the first releases it.

    Raises:
        RegistryError: If the folder cannot be written to.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as e:
        raise RegistryError(f"cannot lock {folder}: {e.strerror}") from e
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
