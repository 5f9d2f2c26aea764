"""Weights through safetensors files, in a folder that trainer and engines can both read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollart_plugins.weights.folder import FolderChannel, Tensors


class DiskChannel(FolderChannel):
    """Safetensors files in a folder that trainer and engines can both read."""

    suffix = ".safetensors"

    def _write(self, path: Path, tensors: Tensors) -> int:
        items = {name: t.detach().to("cpu").contiguous() for name, t in tensors}
        # safetensors sorts by name, so the order published travels in the metadata.
        save_file(items, path, metadata={"order": json.dumps(list(items))})
        with path.open("rb") as file:  # whole on the disk before it gets its name
            os.fsync(file.fileno())
        return sum(t.nbytes for t in items.values())

    def _read(self, path: Path) -> Tensors:
        if not path.exists():
            raise FileNotFoundError(path)
        return _tensors(safe_open(path, framework="pt"))


def _tensors(file: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in json.loads(file.metadata()["order"]):
        yield name, file.get_tensor(name)
