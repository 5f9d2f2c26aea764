"""Low-rank adapters: their tensors in transfer, and the merge into a base weight.

    trainer: A, scale * B  -- weight channel -->  engine: W + (scale * B) A, with its own base

(arXiv:2106.09685, equation 3.) Takes: tensors. Gives: tensor names, and a merged weight. Never:
trains, or imports peft.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of adapter tensors, for example after ``model.layers.0.mlp.up_proj``. A is ``[rank,
in]``. B is ``[out, rank]`` and includes the scale ``alpha / rank``."""


def merge(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return ``weight + up @ down`` in float32.

    Args:
        weight: ``[out, in]``, of any dtype.
        down: ``[rank, in]`` float32.
        up: ``[out, rank]`` float32, including the scale.
    """
    return torch.addmm(weight.float(), up, down)
