"""Weights in safetensors files, in a folder that trainer and engines can both read.

A version is ``v<N>.json``, which lists its files in order with a checksum for each tensor, and
these files, with one bucket each: ``v<N>-<random>-<k>.safetensors``. The JSON file is written last.
Inference servers on the machine can read the same files (:meth:`DiskChannel.files`).
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollart_plugins.weights.folder import FolderChannel
from rollart_plugins.weights.tensors import Tensors, buckets, raw


class DiskChannel(FolderChannel):
    """Safetensors files in a folder that trainer and engines can both read."""

    suffix = ".json"
    survives: ClassVar[bool] = True
    """Whether versions are written to the disk with checksums. Memory needs neither."""

    def files(self, policy_version: int) -> list[Path]:
        """See :meth:`WeightChannel.files`."""
        try:
            rows = _index(self._path(policy_version))
        except (FileNotFoundError, NotADirectoryError):
            raise LookupError(self._lacks(policy_version)) from None
        return [self._folder / row["file"] for row in rows]

    @classmethod
    def _patterns(cls) -> tuple[str, ...]:
        return (*super()._patterns(), "v*.safetensors")

    def _write(self, policy_version: int, path: Path, tensors: Tensors) -> int:
        once, files, num_bytes = secrets.token_hex(4), [], 0
        written: list[Path] = []
        try:
            for k, bucket in enumerate(buckets(tensors, self._bucket_bytes)):
                name = f"v{policy_version}-{once}-{k:05}.safetensors"
                written.append(self._folder / name)
                save_file(dict(bucket), written[-1], metadata={"format": "pt"})
                files.append({"file": name, "crc32": {n: self._sum(t) for n, t in bucket}})
                self._sync(written[-1])
                num_bytes += sum(t.nbytes for _, t in bucket)
            path.write_text(json.dumps(files), encoding="utf-8")
            self._sync(path)  # complete on disk before it gets its name
        except BaseException:
            for file in written:
                file.unlink(missing_ok=True)
            raise
        return num_bytes

    def _read(self, path: Path) -> Tensors:
        files = _index(path)
        opened = []
        for row in files:  # open all files now: open files stay readable after their removal
            file = path.parent / row["file"]
            if not file.exists():
                raise FileNotFoundError(file)
            try:
                opened.append((safe_open(file, framework="pt"), row["crc32"], file))
            except SafetensorError as e:
                raise ValueError(f"{file} is damaged: {e}") from e
        return _tensors(opened)

    def _sum(self, tensor: torch.Tensor) -> int | None:
        return checksum(tensor) if self.survives else None

    def _sync(self, path: Path) -> None:
        if self.survives:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _companions(self, policy_version: int) -> list[Path]:
        return list(self._folder.glob(f"v{policy_version}-*.safetensors"))

    def _leftovers(self) -> list[Path]:
        named = {
            row["file"]
            for version in self.versions()
            for row in _index(self._path(version), damaged_is_empty=True)
        }
        found = self._folder.glob("v*.safetensors")
        return [*super()._leftovers(), *(p for p in found if p.name not in named)]


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(raw(tensor).numpy().data) if tensor.nbytes else 0


def _index(path: Path, *, damaged_is_empty: bool = False) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        if damaged_is_empty:
            return []
        raise ValueError(f"{path} is damaged: {e}") from e
    return rows


def _tensors(
    opened: list[tuple[Any, dict[str, int | None], Path]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for handle, sums, file in opened:
        for name, wanted in sums.items():
            tensor = handle.get_tensor(name)
            if wanted is not None and checksum(tensor) != wanted:
                raise ValueError(f"{file} is damaged: {name!r} does not match its checksum")
            yield name, tensor
