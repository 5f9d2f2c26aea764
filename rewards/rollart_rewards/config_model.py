"""Options of the learned reward model. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart_core.config.base import Count, Number, Positive, PositiveInt
from rollart_rewards.config_answers import Options


class RewardModelConfig(Options):
    """Options of ``rollart/RewardModel-v1``."""

    model: Annotated[str, Field(min_length=1)]
    """A sequence classifier of transformers with its tokenizer: a folder, or a name on the hub."""
    revision: str | None = None
    """Of a model on the hub: branch, tag or commit; none: its newest."""
    label: Count = 0
    """Which of the model's outputs counts. With one output the value is
    ``1 / (1 + exp(-(output - center) / scale))``, with several the softmax's share of this one."""
    center: Number = 0.0
    """Of a model with one output: the output that is worth 0.5."""
    scale: Positive = 1.0
    """Outputs are divided by this first."""
    max_tokens: PositiveInt = 4096
    """A longer conversation loses its beginning."""
    max_batch: PositiveInt = 8
    """Most conversations in one forward pass. In a batch the last digits of a value depend on its
    neighbours; with 1 they do not."""
    device: str = "cpu"
    """Such as ``cuda:0``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """What weights are held in; ``auto``: as the model's files have them."""
    num_threads: PositiveInt | None = None
    """Threads of a forward pass on a CPU; none: as torch has it in this process."""
    local_only: bool = False
    """Whether nothing may be fetched from the hub."""
