"""The config of ``rollart sft``, from a file and from the command line.

Takes: a YAML file, data files and ``key=value``. Gives: a frozen :class:`SftConfig`, or one
ConfigError with a line for each problem. Never: reads the data, or imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from rollart_core.config.base import (
    Name,
    PluginRef,
    PositiveInt,
    Processes,
    Section,
    Seed,
    Threads,
)
from rollart_core.config.load import apply_override, as_error, read_yaml
from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.problems import of_validation
from rollart_core.config.training import LoRA, Trainer
from rollart_core.errors import ConfigError
from rollart_envs.questions.config import SHARES, Shares

_CONFIGS = (".yaml", ".yml")


class SftCheckpoint(Section):
    """Which checkpoints are kept, and which weights are the result."""

    every_batches: PositiveInt = 100
    """Number of batches between two checkpoints, from which ``--resume`` continues."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    keep_best: bool = True
    """Use the weights with the lowest held-out loss as the trained model. If false, or without
    held-out rows, the last weights are the trained model."""


def _which_model(value: object) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "NewModel" if kind == "new" else "ModelPath"


class SftConfig(Section):
    """A supervised fine-tuning."""

    name: Name = "sft"
    """Name of the run. The run directory is ``<runs_dir>/<name>-<time>``."""
    seed: Seed = 0
    """Seed of the order of the rows, of adapters and of a new model."""
    deterministic: bool = False
    """Whether equal runs have bitwise equal losses. Slower."""
    runs_dir: str = "runs"
    """Folder in which run directories are created."""
    model: Annotated[
        Annotated[ModelPath, Tag("ModelPath")] | Annotated[NewModel, Tag("NewModel")],
        Discriminator(_which_model),
    ] = Field(description="a model's folder, a hub id, or {kind: new}")
    data: tuple[Annotated[str, Field(min_length=1)], ...]
    """Sources of rows: files that end in `.jsonl`, `.parquet` or `.csv`, folders with such files,
    folders of `save_to_disk`, and ids of datasets on the Hugging Face hub."""
    subset: Name | None = None
    """Subset of a dataset on the hub, such as `main`."""
    preset: Literal["gsm8k", "math", "multiple-choice", "code"] | None = None
    """Format of the rows, as in ``text/Questions-v1``. The model learns the dataset's solutions."""
    question: Name | None = None
    """Field of a row with the question: a text, or a list of messages. If not set, the first of
    `messages`, `prompt` and `question` that the row has."""
    answer: Name | None = None
    """Field of a row with the answer. A dot reads inside an object. If not set, the first of
    `completion`, `answer`, `reference`, `ground_truth` and `solution` that the row has. A
    conversation with answers needs no such field."""
    prompt: str | None = None
    """Text before every question. If not set, the text of the preset, or none."""
    shares: Shares = Field(default_factory=lambda: dict(SHARES))
    """Share of each split that the data do not name, selected by a hash of the question. Rows of
    ``validation`` give the held-out loss. Rows of ``warm`` and ``test`` are not used, so that RL on
    the same file can use them."""
    split_seed: int = 0
    """Seed of the hash."""
    epochs: PositiveInt = 3
    """Number of passes over the training rows, each in a different order."""
    batch_rows: PositiveInt = 16
    """Number of rows per batch."""
    batch_tokens: PositiveInt | None = None
    """Number of tokens per batch, in place of ``batch_rows``. A batch has as many rows as fit, and
    at least one."""
    max_context_tokens: PositiveInt = 2048
    """Maximum number of tokens of a row."""
    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    """What happens to longer rows. ``refuse``: the run does not start. ``truncate``: only the first
    ``max_context_tokens`` tokens are trained on. ``drop``: they are left out. The report counts
    them."""
    lora: LoRA | None = None
    """Train LoRA adapters instead of the whole model."""
    trainer: Trainer = Trainer()
    """How weights are updated, as in a run. A schedule ends with the last batch."""
    evaluate_every: PositiveInt | None = None
    """Number of batches between two measurements of the held-out loss. If not set, it is measured
    after each epoch."""
    checkpoint: SftCheckpoint = SftCheckpoint()
    """Which checkpoints are kept, and which weights are the result."""
    trackers: tuple[PluginRef, ...] = (PluginRef(id="tensorboard"),)
    """Trackers that receive the metrics. ``[]`` disables them."""
    num_trainer_ranks: Processes = 1
    """Number of trainer processes that share parameters and work. On CUDA each uses one device."""
    trainer_threads: Threads = 1
    """Number of CPU threads that torch uses in each trainer rank."""

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        if value in ("", ".", "..") or any(c in value for c in "/\\\0"):
            raise ValueError(f"{value!r} cannot be part of a folder's name: remove / and \\")
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_an_effect(self) -> SftConfig:
        if self.batch_tokens is not None and "batch_rows" in self.model_fields_set:
            raise ValueError("batch_rows has no effect with batch_tokens; remove one of the two")
        if self.lora is not None and isinstance(self.model, NewModel):
            raise ValueError("lora needs a trained model: set model.path, or remove lora")
        if not self.data:
            raise ValueError("data has no file")
        if self.preset and (self.question or self.answer):
            raise ValueError("question and answer have no effect with preset; remove them")
        return self


def load_sft_config(arguments: Sequence[str]) -> SftConfig:
    """Return the config of a command line.

    Args:
        arguments: At most one YAML file, data files, and ``key=value``, in any order.

    Raises:
        ConfigError: With one line for each problem.
    """
    files = [a for a in arguments if "=" not in a]
    configs = [file for file in files if Path(file).suffix in _CONFIGS]
    if len(configs) > 1:
        raise ConfigError(f"give one config file, not {', '.join(configs)}")
    source = configs[0] if configs else "command line"
    mapping = read_yaml(Path(configs[0])) if configs else {}
    data = [file for file in files if file not in configs]
    if data:
        mapping["data"] = data
    overridden = [apply_override(mapping, a) for a in arguments if "=" in a]
    return checked(mapping, source, [("data",), *overridden] if data else overridden)


def checked(
    mapping: dict[str, Any], source: str | Path, overridden: Sequence[tuple[str, ...]] = ()
) -> SftConfig:
    """Return the config of a mapping.

    Raises:
        ConfigError: With one line for each problem.
    """
    try:
        return SftConfig.model_validate(mapping)
    except ValidationError as e:
        raise as_error(of_validation(e, SftConfig), source, overridden) from e
