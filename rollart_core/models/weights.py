"""Reads the tensors of a model folder: all tensors, or single tensors and rows.

Takes: a local folder or a hub id. Gives: Hugging Face names and tensors on the CPU. Never: builds a
model, unless the folder has no safetensors and transformers must read it; reads more of a
safetensors file than requested (:class:`TensorFiles`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rollart_core.errors import ConfigError


def model_folder(path: str) -> Path:
    """Return the local folder of a model path. Download a hub id if a hub is reachable.

    Raises:
        ConfigError: If it is neither a folder nor an available hub id.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    # The tests on GPUs import this module without pydantic.
    from rollart_core.config.validation.consistency import model_path_fault

    if fault := model_path_fault(path):
        raise ConfigError(f"model.path: {fault}")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as e:
        raise ConfigError(f"model {path!r} is not a folder, and no hub provides it: {e}") from e


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, as transformers selects them. May be empty."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


def iter_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a folder, file by file.

    Raises:
        ConfigError: If the folder has no readable weights.
    """
    files = weight_files(folder)
    if not files:
        yield from _through_transformers(folder)
        return
    from safetensors import safe_open

    for file in files:
        with _reading(file), safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
                yield name, handle.get_tensor(name)


def _through_transformers(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except Exception as e:
        raise ConfigError(f"model folder {str(folder)!r} has no readable weights: {e}") from e
    yield from model.state_dict().items()


class TensorFiles:
    """Several safetensors files, open until :meth:`close`.

    Args:
        files: The files. Tensor names must be unique.

    Raises:
        ConfigError: If a file is missing or is not a safetensors file.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        from safetensors import safe_open

        self._open = ExitStack()
        self._files: dict[str, Path] = {}
        self._slices: dict[str, Any] = {}
        with ExitStack() as opening:
            opening.callback(self._open.close)
            for file in files:
                with _reading(file):
                    handle = self._open.enter_context(safe_open(file, framework="pt"))
                    for name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
                        self._files[name] = file
                        self._slices[name] = handle.get_slice(name)
            opening.pop_all()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading the tensor."""
        return tuple(self._slices[name].get_shape())

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows ``first`` to ``last`` of a tensor, ``[last - first, ...]``.

        Raises:
            ConfigError: If the file cannot be read.
        """
        with _reading(self._files[name]):
            rows: torch.Tensor = self._slices[name][first:last]
        return rows

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor.

        Raises:
            ConfigError: If the file cannot be read.
        """
        with _reading(self._files[name]):
            tensor: torch.Tensor = self._slices[name][...]
        return tensor

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._slices.clear()
        self._open.close()


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as e:
        raise ConfigError(
            f"weights {str(file)!r} cannot be read ({e}): copy or download it again"
        ) from e
