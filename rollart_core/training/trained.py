"""What of a model is trained, kept in checkpoints, and published.

Takes: a model. Gives: the parameters an optimizer updates, and tensors for checkpoints, engines and
folders. Never: computes with them. Here it is the whole model; :mod:`rollart_core.training.lora`
has another.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rollart_core.training import checkpoint


class TrainedWeights:
    """All weights of a model, sharded or not.

    Args:
        model: A transformers causal LM.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by name; a tied one once."""
        return dict(self.model.named_parameters())

    def kept(self) -> checkpoint.State:
        """Return what a checkpoint keeps of them; to be saved, or loaded into."""
        return {"model": checkpoint.named_tensors(self.model)}

    def check_loaded(self, kept: checkpoint.State, path: str) -> None:
        """Refuse what a checkpoint held when it does not fit.

        Raises:
            ConfigError: Saying what to do.
        """

    def whole(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model under transformers' names, made one by one."""
        return checkpoint.stream(checkpoint.named_tensors(self.model), dtype)

    def published(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield what goes to the engines, made one by one."""
        return self.whole(dtype)

    def export_with_adapters(self, path: str) -> None:
        """Write, beside a folder with the whole model, what else there is to be had."""
