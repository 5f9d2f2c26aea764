"""The safetensors files of a model, read tensor by tensor and row by row.

Takes: files. Gives: names, shapes, and rows as tensors on the CPU, in the dtype they are written
in. Never: reads more of a file than it is asked for, or keeps what it has read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rollart_core.errors import ConfigError


class TensorFiles:
    """Some safetensors files, open until :meth:`close`.

    Args:
        files: Which; their names are all different.

    Raises:
        ConfigError: When one is not there, or is no such file.
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
        """The tensors there are."""
        return list(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, which reads none of it."""
        return tuple(self._slices[name].get_shape())

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return some rows of a tensor, ``[last - first, ...]``.

        Raises:
            ConfigError: When the file cannot be read.
        """
        with _reading(self._files[name]):
            rows: torch.Tensor = self._slices[name][first:last]
        return rows

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor.

        Raises:
            ConfigError: When the file cannot be read.
        """
        with _reading(self._files[name]):
            tensor: torch.Tensor = self._slices[name][...]
        return tensor

    def close(self) -> None:
        """Close the files; may be called twice."""
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
