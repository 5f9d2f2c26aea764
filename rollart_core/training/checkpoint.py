"""Checkpoints of the trainer, and folders that transformers loads.

Takes: named tensors (sharded or plain). Gives: a torch.distributed.checkpoint folder that any
number of ranks can load, or a Hugging Face folder. Never: leaves an incomplete checkpoint under its
final name (a folder is renamed when it is complete), or loads one with changed files.

Each rank writes its own shards, so the folder must be visible to all ranks. It also contains
``checksums.json``: name -> ``[bytes, CRC-32]`` of every file.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rollart_core.errors import ConfigError, first_line
from rollart_core.training import distributed

CHECKSUMS = "checksums.json"

State = dict[str, "Tensor | dict[str, Tensor] | dict[str, dict[str, Tensor]]"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def save(path: str, state: State) -> None:
    """Save ``state`` at ``path``; an existing checkpoint is replaced when the new one is complete.

    Raises:
        OSError: If it cannot be written; the existing checkpoint is kept.
    """

    def write(part: Path) -> None:
        with _quiet():
            try:
                dcp_save(state, checkpoint_id=part, no_dist=distributed.world_size() == 1)
            except CheckpointException as e:
                # It is not an Exception, so handlers of Exception would not catch it.
                raise OSError(f"cannot write the checkpoint {path}: {_reason(e)}") from e
        names = sorted(p.name for p in part.iterdir()) if part.is_dir() else []
        if any(seen != names for seen in distributed.gather(names)):
            raise OSError(f"trainer ranks do not all see {part}: put runs_dir on a shared disk")
        with distributed.together():
            mine = _sums_of(part, names)
        sums = [row for rows in distributed.gather(mine) for row in rows]
        with distributed.together():
            if distributed.rank() == 0:
                (part / CHECKSUMS).write_text(json.dumps(dict(sorted(sums)), indent=1))

    replace_folder(Path(path), write)


def load(path: str, state: State, *, optional: Sequence[str] = ()) -> None:
    """Load a checkpoint into the tensors of ``state``.

    Args:
        path: The checkpoint.
        state: Names and tensors.
        optional: Single tensors that are removed from ``state`` if the checkpoint has no tensor
            with that name and shape.

    Raises:
        ConfigError: If ``path`` contains no checkpoint, a damaged one, or one of another model.
    """
    if not (Path(path) / ".metadata").is_file():
        raise ConfigError(f"{path} contains no checkpoint")
    with distributed.together():
        _check_sums(Path(path))
    try:
        _leave_out_missing(path, state, optional)
        with _quiet():
            dcp_load(state, checkpoint_id=path, no_dist=distributed.world_size() == 1)
    except (KeyError, ValueError, RuntimeError, OSError, EOFError, CheckpointException) as e:
        raise ConfigError(
            f"the checkpoint {path} is not of this model and algorithm: {_reason(e)}"
        ) from e


def _leave_out_missing(path: str, state: State, optional: Sequence[str]) -> None:
    asked = [name for name in optional if name in state]
    if not asked:
        return
    held = FileSystemReader(path).read_metadata().state_dict_metadata
    for name in asked:
        wanted = state[name]
        assert isinstance(wanted, Tensor)
        if getattr(held.get(name), "size", None) != wanted.size():
            del state[name]


def export_hf(
    path: str, model: nn.Module, tensors: Mapping[str, Tensor], tokenizer_path: str | None
) -> None:
    """Write a folder that transformers loads, with the tokenizer of ``tokenizer_path``.

    The first rank writes it from its tensors; the tensors of other ranks are ignored.
    """

    def write(part: Path) -> None:
        with distributed.together():
            if distributed.rank() == 0:
                write_here(part)

    def write_here(part: Path) -> None:
        dtype = next(iter(tensors.values())).dtype
        write_model: Any = model.save_pretrained
        kept = model.state_dict().keys()  # without buffers that are computed
        buffers = {name: b for name, b in model.named_buffers() if name in kept}
        write_model(part, state_dict=buffers | dict(tensors))
        config = json.loads((part / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if tokenizer_path is not None:
            _copy_tokenizer(tokenizer_path, part)

    replace_folder(Path(path), write)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by their transformers names; a tied one once, under its first name."""
    distributed.reshard(model)
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=True)}


def _copy_tokenizer(source: str, target: Path) -> None:
    if Path(source).is_dir():
        for name in TOKENIZER_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, target / name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with a temporary folder, then rename it to ``path``."""
    part, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    first = distributed.rank() == 0
    with distributed.together():
        if first:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            _remove_halves(path.parent)
    write(part)
    with distributed.together():
        if first:
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            part.rename(path)
            shutil.rmtree(old, ignore_errors=True)


def _remove_halves(parent: Path) -> None:
    """Remove incomplete checkpoints that killed ranks have left."""
    for folder in (path for path in parent.glob(".*.part") if path.is_dir()):
        names = [p.name for p in folder.iterdir()]
        if all(n.endswith((".distcp", ".tmp")) or n in {".metadata", CHECKSUMS} for n in names):
            shutil.rmtree(folder, ignore_errors=True)


def _sums_of(folder: Path, names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the name, size and CRC-32 of this rank's share of some files."""
    mine = names[distributed.rank() :: distributed.world_size()]
    return [(name, _sum_of(folder / name)) for name in mine]


def _sum_of(file: Path) -> list[int]:
    size = crc = 0
    with file.open("rb") as content:
        while chunk := content.read(2**22):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]


def _check_sums(folder: Path) -> None:
    """Check the checksums of this rank's share of the files, if the checkpoint has checksums.

    Raises:
        ConfigError: If a file has changed; the error names the first one.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():  # a checkpoint of an older release
        return
    try:
        written: dict[str, list[int]] = json.loads(sums.read_text(encoding="utf-8"))
        mine = sorted(written.items())[distributed.rank() :: distributed.world_size()]
    except (ValueError, AttributeError):
        raise _damaged(sums, "it is not JSON") from None
    for name, was in mine:
        file = folder / name
        if not file.is_file():
            raise _damaged(file, "it is missing")
        if (now := _sum_of(file)) != was:
            what = f"{now[0]} bytes where {was[0]} were written"
            raise _damaged(file, what if now[0] != was[0] else "its content has changed")


def _damaged(file: Path, how: str) -> ConfigError:
    return ConfigError(
        f"{file} is damaged ({how}): restore it from a copy, or remove the folder "
        f"{file.parent.name} to continue from the checkpoint before it"
    )


def _reason(error: BaseException) -> str:
    """Return the reason in one line; a common error contains the errors of ranks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return first_line(str(error) or type(error).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning about a single rank, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def on_first_rank(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors on the CPU on the first rank; nothing on other ranks.

    This is a collective call if the tensors are sharded.
    """
    first = distributed.rank() == 0
    return {name: t.to("cpu") for name, t in tensors if first}


def stream(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in ``dtype``, created one by one on their device.

    If they are sharded, every rank must consume all of them: each is a collective call.
    """
    for name, tensor in tensors.items():
        yield name, distributed.whole(tensor.to(dtype))
