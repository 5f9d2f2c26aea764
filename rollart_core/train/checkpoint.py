"""Checkpoints of the trainer, and folders that transformers loads.

Takes: named tensors (sharded or plain). Gives: a torch.distributed.checkpoint folder that any
number of ranks can load, or a Hugging Face folder. Never: leaves half a checkpoint under its final
name (a folder is renamed when it is whole).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rollart_core.errors import ConfigError, first_line
from rollart_core.train import distributed

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
    """Save ``state`` at ``path``; what was there is replaced when the new one is whole."""

    def write(part: Path) -> None:
        with _quiet():
            dcp_save(state, checkpoint_id=part, no_dist=distributed.world_size() == 1)

    _replace_folder(Path(path), write)


def load(path: str, state: State) -> None:
    """Load a checkpoint into the tensors of ``state``.

    Raises:
        ConfigError: When ``path`` holds no checkpoint, or one of another model.
    """
    if not (Path(path) / ".metadata").is_file():
        raise ConfigError(f"{path} holds no checkpoint")
    try:
        with _quiet():
            dcp_load(state, checkpoint_id=path, no_dist=distributed.world_size() == 1)
    except (KeyError, ValueError, RuntimeError, CheckpointException) as e:
        raise ConfigError(
            f"the checkpoint {path} is not of this model and algorithm: {first_line(str(e))}"
        ) from e


def export_hf(
    path: str, model: nn.Module, tensors: Mapping[str, Tensor], tokenizer_path: str | None
) -> None:
    """Write a folder that transformers loads; with the tokenizer of ``tokenizer_path``."""
    dtype = next(iter(tensors.values())).dtype

    def write(part: Path) -> None:
        if distributed.rank() > 0:
            return
        save: Any = model.save_pretrained
        save(part, state_dict=dict(tensors))
        config = json.loads((part / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if tokenizer_path is not None:
            _copy_tokenizer(tokenizer_path, part)

    _replace_folder(Path(path), write)


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


def _replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder beside ``path``, then give it that name."""
    part, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    first = distributed.rank() == 0
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
    distributed.barrier()
    write(part)
    distributed.barrier()
    if first:
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    distributed.barrier()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hush the remark that there is one rank only, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return whole tensors on the CPU in ``dtype`` (a collective call where they are sharded)."""
    return {name: t.to("cpu") for name, t in stream(tensors, dtype)}


def stream(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in ``dtype``, made one by one, where they lie.

    Where they are sharded every rank must go through all of it: each is a collective call.
    """
    for name, tensor in tensors.items():
        yield name, distributed.whole(tensor).to(dtype)
