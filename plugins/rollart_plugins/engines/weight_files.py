"""New weights as a folder of safetensors files, which a server loads like its initial weights.

    model-00001.safetensors, model-00002.safetensors, ...    about one bucket each
    model.safetensors.index.json                             the file of each tensor

Takes: tensors, one by one. Gives: model folders, and a parent folder that a later engine can clean
up.
Never: holds copies of more than one bucket, or removes files of an engine on another machine from a
shared disk.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
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


def write_model(folder: Path, tensors: Iterable[Named], bucket_bytes: int = BUCKET_BYTES) -> int:
    """Write tensors into an existing folder; return their number of bytes.

    Raises:
        InferenceFailure: If they cannot be written.
        Exception: Any error that ``tensors`` raises.
    """
    from safetensors.torch import save_file

    where: dict[str, str] = {}
    num_bytes = 0
    for number, bucket in enumerate(buckets(tensors, bucket_bytes), 1):
        name = f"model-{number:05}.safetensors"
        # safetensors rejects views of shared memory, and views would keep all of it alive
        plain = {key: tensor.clone() for key, tensor in bucket}
        with written(folder):
            save_file(plain, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(0o644)  # by default, only this user can read it
        where |= dict.fromkeys(plain, name)
        num_bytes += sum(tensor.nbytes for tensor in plain.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": where}
    with written(folder):
        (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    return num_bytes


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
        raise InferenceFailure(
            f"new weights cannot be written to {folder}: {e}", boundary="load_weights"
        ) from e
