"""The weights of a model that are trained, saved in checkpoints, and published.

Takes: a model. Gives: the parameters that an optimizer updates, and tensors for checkpoints,
engines and folders. Never: computes with them. This module trains the whole model;
:mod:`rollart_core.training.lora` trains adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rollart_core.models.hub_names import as_in_files
from rollart_core.training import checkpoint


class TrainedWeights:
    """All weights of a model, sharded or not.

    Args:
        model: A transformers causal LM.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name; a tied one once."""
        return dict(self.model.named_parameters())

    def kept(self) -> checkpoint.State:
        """Return their state in a checkpoint, to save or to load into."""
        return {"model": checkpoint.named_tensors(self.model)}

    def check_loaded(self, kept: checkpoint.State, path: str) -> None:
        """Check that the loaded state of a checkpoint fits.

        Raises:
            ConfigError: If it does not fit; the error names a fix.
        """

    def whole(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model under transformers' names, created one by one."""
        return checkpoint.stream(checkpoint.named_tensors(self.model), dtype)

    def published(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for the engines under the names in files, created one by one."""
        config: Any = self.model.config
        return as_in_files(self.whole(dtype), config.architectures or ())

    def export_with_adapters(self, path: str) -> None:
        """Write additional exports next to the folder of the whole model; none by default."""
