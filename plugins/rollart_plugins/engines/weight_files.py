"""New weights as a folder of safetensors files, which a server loads like its initial weights.

    model-00001.safetensors, model-00002.safetensors, ...    about one bucket each, or links
    model.safetensors.index.json                             the file of each tensor

Takes: tensors, one by one, or files of a weight channel. Gives: model folders, and a parent folder
that a later engine can clean up.
Never: holds copies of more than one bucket, or removes files of an engine on another machine from a
shared disk.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import torch

from rollart_core.errors import InferenceFailure
from rollart_plugins.weights.tensors import buckets
from rollart_sandboxes.pool.owner import is_left, stamp

Named: TypeAlias = tuple[str, torch.Tensor]

BUCKET_BYTES: Final = 256 * 2**20
_INDEX = "model.safetensors.index.json"


def new_folder(kind: str, folder: str | None) -> Path:
    """Make a folder for an engine's versions, and remove folders of killed engines on this machine.

    Args:
        kind: The kind of engine, one word.
        folder: Parent folder. None: the temporary folder.
    """
    home = Path(folder or tempfile.gettempdir())
    home.mkdir(parents=True, exist_ok=True)
    prefix = f"rollart-{kind}-"
    for left in home.glob(f"{prefix}*"):
        if is_left(left.name):
            shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}{stamp()}", dir=home))
    path.chmod(0o755)  # the server can run as another user
    return path


def folder_beside(files: Sequence[Path]) -> Path:
    """Make a folder next to a weight channel's folder, on the file system of its files."""
    with written(files[0].parent.parent):
        return Path(tempfile.mkdtemp(prefix="served-", dir=files[0].parent.parent))


def write_model(folder: Path, tensors: Iterable[Named], bucket_bytes: int = BUCKET_BYTES) -> int:
    """Write tensors into an existing folder; return their number of bytes.

    Raises:
        InferenceFailure: If they cannot be written.
        Exception: Any error that ``tensors`` raises.
    """
    where: dict[str, str] = {}
    num_bytes = 0
    for number, bucket in enumerate(buckets(tensors, bucket_bytes), 1):
        name = f"model-{number:05}.safetensors"
        _write_file(folder / name, dict(bucket))
        where |= {key: name for key, _ in bucket}
        num_bytes += sum(tensor.nbytes for _, tensor in bucket)
    with written(folder):
        _write_index(folder, num_bytes, where)
    return num_bytes


def link_model(folder: Path, files: Sequence[Path], tensors: Iterable[Named]) -> int:
    """Link existing files into a folder, without a copy; return the bytes of all tensors.

    Tensors that are in none of the files are written to one more.

    Args:
        folder: The folder, on the file system of the files.
        files: Safetensors files.
        tensors: The tensors in the files, which are checked by the caller as they are read here,
            and a few others.

    Raises:
        InferenceFailure: If the files cannot be linked.
        LookupError: If a file has been removed meanwhile.
        Exception: Any error that ``tensors`` raises.
    """
    from safetensors import safe_open

    where: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}.safetensors"
        try:
            os.link(file, folder / name)
        except FileNotFoundError as e:
            raise LookupError(f"the weights in {file} are gone") from e
        except OSError as e:
            raise _not_written(folder, e) from e
        with safe_open(folder / name, framework="pt") as held:
            where |= dict.fromkeys(held.keys(), name)
    num_bytes, others = 0, {}
    for key, tensor in tensors:
        num_bytes += tensor.nbytes
        if key not in where:
            others[key] = tensor
    if others:
        name = f"model-{len(files) + 1:05}.safetensors"
        _write_file(folder / name, others)
        where |= dict.fromkeys(others, name)
    with written(folder):
        _write_index(folder, num_bytes, where)
    return num_bytes


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    # safetensors rejects views of shared memory, and views would keep all of it alive
    plain = {key: tensor.clone() for key, tensor in tensors.items()}
    with written(path.parent):
        save_file(plain, path, metadata={"format": "pt"})
        path.chmod(0o644)  # by default, only this user can read it


def _write_index(folder: Path, num_bytes: int, where: dict[str, str]) -> None:
    index = {"metadata": {"total_size": num_bytes}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _not_written(folder: Path, error: Exception) -> InferenceFailure:
    return InferenceFailure(
        f"new weights cannot be written to {folder}: {error}", boundary="load_weights"
    )


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Convert errors of the file system to an error about writing weights.

    Raises:
        InferenceFailure: For such an error.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as e:
        raise _not_written(folder, e) from e
