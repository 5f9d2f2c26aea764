"""Checkpoints of the trainer, and folders that transformers loads.

Takes: named tensors (sharded or plain). Gives: a torch.distributed.checkpoint folder that any
number of ranks can load, or a Hugging Face folder. Never: leaves half a checkpoint under its final
name (a folder is renamed when it is whole), or loads one whose files are not as they were written.

Each rank writes the shards it holds, so the folder must be one that all of them see. Beside them
lies ``checksums.json``: name -> ``[bytes, CRC-32]`` of every file.
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
    """Save ``state`` at ``path``; what was there is replaced when the new one is whole.

    Raises:
        OSError: When it cannot be written; the one that was there stays.
    """

    def write(part: Path) -> None:
        with _quiet():
            try:
                dcp_save(state, checkpoint_id=part, no_dist=distributed.world_size() == 1)
            except CheckpointException as e:
                # It is no Exception, and would pass all who keep things whole.
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
        optional: Single tensors that are removed from ``state`` when the checkpoint has none of
            that name and shape.

    Raises:
        ConfigError: When ``path`` holds no checkpoint, a damaged one, or one of another model.
    """
    if not (Path(path) / ".metadata").is_file():
        raise ConfigError(f"{path} holds no checkpoint")
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
    """Write a folder that transformers loads; with the tokenizer of ``tokenizer_path``.

    The first rank writes it, from the tensors it has; those of the others do not matter.
    """

    def write(part: Path) -> None:
        with distributed.together():
            if distributed.rank() == 0:
                write_here(part)

    def write_here(part: Path) -> None:
        dtype = next(iter(tensors.values())).dtype
        write_model: Any = model.save_pretrained
        write_model(part, state_dict=dict(tensors))
        config = json.loads((part / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if tokenizer_path is not None:
            _copy_tokenizer(tokenizer_path, part)

    replace_folder(Path(path), write)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by their transformers names; a tied one only once, under its first name."""
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
    """Let ``write`` fill a folder beside ``path``, then give it that name."""
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
    """Remove checkpoints that ranks which were killed have left half written."""
    for folder in (path for path in parent.glob(".*.part") if path.is_dir()):
        names = [p.name for p in folder.iterdir()]
        if all(n.endswith((".distcp", ".tmp")) or n in {".metadata", CHECKSUMS} for n in names):
            shutil.rmtree(folder, ignore_errors=True)


def _sums_of(folder: Path, names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return name, bytes and CRC-32 of this rank's share of some files."""
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
    """Read this rank's share of the files against their checksums, where there are any.

    Raises:
        ConfigError: Naming the first file that is not as it was written.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():  # written before there were any
        return
    try:
        written: dict[str, list[int]] = json.loads(sums.read_text(encoding="utf-8"))
        mine = sorted(written.items())[distributed.rank() :: distributed.world_size()]
    except (ValueError, AttributeError):
        raise _damaged(sums, "it is no JSON") from None
    for name, was in mine:
        file = folder / name
        if not file.is_file():
            raise _damaged(file, "it is not there")
        if (now := _sum_of(file)) != was:
            what = f"{now[0]} bytes where {was[0]} were written"
            raise _damaged(file, what if now[0] != was[0] else "other bytes than were written")


def _damaged(file: Path, how: str) -> ConfigError:
    return ConfigError(
        f"{file} is damaged ({how}): copy it back from where it is whole, or remove the folder "
        f"{file.parent.name} to go on from the checkpoint before it"
    )


def _reason(error: BaseException) -> str:
    """Return one line that says what went wrong; ranks' errors stand inside a common one."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return first_line(str(error) or type(error).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hush the remark that there is one rank only, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def on_first_rank(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors as they are made, on the CPU; on other ranks than the first, none.

    A collective call where they are sharded.
    """
    first = distributed.rank() == 0
    return {name: t.to("cpu") for name, t in tensors if first}


def stream(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in ``dtype``, made one by one, where they lie.

    Where they are sharded every rank must go through all of it: each is a collective call.
    """
    for name, tensor in tensors.items():
        yield name, distributed.whole(tensor.to(dtype))
