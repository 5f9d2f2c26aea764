"""What every weight channel that is a folder shares: versions are files, and a rename publishes.

Takes: a folder both ends can reach. Gives: publish, fetch and clean-up over one file a version.
Never: lets a reader see half a version (a file gets its name when it is whole), or leaves files
behind when the publisher's end is closed.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rollart_core.contracts.weights import Publication, WeightChannel

if TYPE_CHECKING:
    import torch

Tensors = Iterable[tuple[str, "torch.Tensor"]]


class FolderChannel(WeightChannel):
    """A weight channel of which every version is one file in ``location``.

    Args:
        location: The folder; made by the first ``publish``.
        keep: How many of the newest versions can be fetched.

    Raises:
        ValueError: When ``keep`` is below 1.
    """

    suffix: ClassVar[str]

    def __init__(self, location: str, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._folder = Path(location)
        self._keep = keep
        self._publishes = False

    def publish(self, policy_version: int, tensors: Tensors) -> Publication:
        """Make a version fetchable; see :class:`WeightChannel`."""
        began = time.perf_counter()
        if not self._publishes:
            self._begin()
        part = self._folder / f".{policy_version}.{os.getpid()}.part"
        try:
            num_bytes = self._write(part, tensors)
            os.replace(part, self._path(policy_version))
        finally:
            part.unlink(missing_ok=True)
        self._prune()
        return Publication(policy_version, num_bytes, time.perf_counter() - began)

    def fetch(self, policy_version: int) -> Tensors:
        """Return the tensors of a version; see :class:`WeightChannel`."""
        try:
            return self._read(self._path(policy_version))
        except FileNotFoundError:
            held = self.versions()
            raise LookupError(
                f"no weights of policy version {policy_version} in {self._folder}; it holds {held}"
            ) from None

    def versions(self) -> list[int]:
        """Return the policy versions that can be fetched, oldest first."""
        names = self._folder.glob(f"v*{self.suffix}")
        return sorted(int(p.name.removeprefix("v").removesuffix(self.suffix)) for p in names)

    def close(self) -> None:
        """Remove everything, where this end published; the reader's end holds nothing."""
        if self._publishes:
            self._publishes = False
            self.remove(str(self._folder))

    @classmethod
    def remove(cls, location: str) -> None:
        """Remove all that a channel keeps there, such as after its publisher was killed."""
        folder = Path(location)
        for path in [*folder.glob(f"v*{cls.suffix}"), *folder.glob(".*.part")]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty (another's files), or not there
            folder.rmdir()

    @abstractmethod
    def _write(self, path: Path, tensors: Tensors) -> int:
        """Write a whole version and return its bytes."""

    @abstractmethod
    def _read(self, path: Path) -> Tensors:
        """Open a version at once (raises FileNotFoundError) and return its tensors in order."""

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".*.part"):  # of a publisher that was killed
            leftover.unlink(missing_ok=True)
        self._publishes = True

    def _path(self, policy_version: int) -> Path:
        return self._folder / f"v{policy_version}{self.suffix}"

    def _prune(self) -> None:
        for version in self.versions()[: -self._keep]:
            self._path(version).unlink(missing_ok=True)
