"""Common code of the folder-based weight channels: versions are files, and a rename publishes.

Takes: a folder that both sides can access. Gives: publish, fetch and clean-up with one file for
each version (which can list others). Never: exposes an incomplete version to readers (a file gets
its name when it is complete), or leaves files behind when the publisher closes.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import torch

from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_plugins.weights.config import BUCKET_BYTES
from rollart_plugins.weights.tensors import Tensors


class FolderChannel(WeightChannel):
    """A weight channel with one file per version in ``location``.

    Args:
        location: The folder; the first ``publish`` creates it.
        keep: Number of newest versions that can be fetched.
        bucket_bytes: Approximate number of bytes in memory while publishing.

    Raises:
        ValueError: If ``keep`` or ``bucket_bytes`` is less than 1.
    """

    suffix: ClassVar[str]

    def __init__(self, location: str, keep: int = 2, bucket_bytes: int = BUCKET_BYTES) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, but is {keep}")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, but is {bucket_bytes}")
        self._folder = Path(location)
        self._keep = keep
        self._bucket_bytes = bucket_bytes
        self._publishes = False
        self._last: int | None = None

    def publish(self, policy_version: int, tensors: Tensors) -> Publication:
        """Publish a version; see :class:`WeightChannel`."""
        began = time.perf_counter()
        if not self._publishes:
            self._begin()
        part = self._folder / f".{policy_version}.{os.getpid()}.part"
        replaced = self._companions(policy_version)
        try:
            num_bytes = self._write(policy_version, part, tensors)
            os.replace(part, self._path(policy_version))
        finally:
            part.unlink(missing_ok=True)
        _unlink(replaced)
        self._last = policy_version
        self._prune()
        self.moved_bytes += num_bytes
        return Publication(policy_version, num_bytes, time.perf_counter() - began)

    def fetch(self, policy_version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors of a version; see :class:`WeightChannel`."""
        try:
            return self._counted(self._read(self._path(policy_version)))
        except (FileNotFoundError, NotADirectoryError):
            raise LookupError(self._lacks(policy_version)) from None

    def versions(self) -> list[int]:
        """Return the policy versions that can be fetched, oldest first."""
        names = self._folder.glob(f"v*{self.suffix}")
        return sorted(int(p.name.removeprefix("v").removesuffix(self.suffix)) for p in names)

    def newest(self) -> int | None:
        """Return the version published last, if any."""
        held = self.versions()
        return held[-1] if held else None

    def close(self) -> None:
        """Remove all files if this side published; a reader has none."""
        if self._publishes:
            self._publishes = False
            self.remove(str(self._folder))

    @classmethod
    def remove(cls, location: str) -> None:
        """Remove all files of a channel, for example after its publisher was killed."""
        folder = Path(location)
        _unlink(p for pattern in cls._patterns() for p in folder.glob(pattern))
        with contextlib.suppress(OSError):  # not empty (other files), or it does not exist
            folder.rmdir()

    @classmethod
    def _patterns(cls) -> tuple[str, ...]:
        return (f"v*{cls.suffix}", ".*.part")

    @abstractmethod
    def _write(self, policy_version: int, path: Path, tensors: Tensors) -> int:
        """Write a complete version and return its number of bytes."""

    @abstractmethod
    def _read(self, path: Path) -> Tensors:
        """Open a version immediately (raises FileNotFoundError) and return its tensors in order."""

    def _companions(self, policy_version: int) -> list[Path]:
        """Return the files of a version other than the main file."""
        return []

    def _counted(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.moved_bytes += tensor.nbytes
            yield name, tensor

    def _lacks(self, policy_version: int) -> str:
        lacks = f"no weights of policy version {policy_version} in {self._folder}"
        if not self._folder.is_dir():
            return (
                f"{lacks}: the folder does not exist (no trainer has published there, or the "
                "channel is closed)"
            )
        return f"{lacks}; available: {self.versions()}"

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        _unlink(self._leftovers())
        self._publishes = True

    def _leftovers(self) -> list[Path]:
        """Return incomplete files of a killed publisher."""
        return list(self._folder.glob(".*.part"))

    def _path(self, policy_version: int) -> Path:
        return self._folder / f"v{policy_version}{self.suffix}"

    def _prune(self) -> None:
        held = self.versions()
        above = [v for v in held if self._last is not None and v > self._last]
        below = [v for v in held if v not in above]
        for version in [*above, *below[: -self._keep]]:
            companions = self._companions(version)
            _unlink([self._path(version), *companions])


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
