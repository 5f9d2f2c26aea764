"""Low-rank adapters as they travel, and the weight that one makes of a base's.

    trainer: A, scale * B  -- weight channel -->  engine: W + (scale * B) A, of a base it has itself

(arXiv:2106.09685, equation 3.) Takes: tensors. Gives: names, and a whole weight. Never: trains, or
needs peft.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"
"""``model.layers.0.mlp.up_proj`` + this is the name of an adapter's tensor: ``[rank, in]`` and, the
scale ``alpha / rank`` within it, ``[out, rank]``."""


def merge(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return ``weight + up @ down`` in float32.

    Args:
        weight: ``[out, in]``, of any dtype.
        down: ``[rank, in]`` float32.
        up: ``[out, rank]`` float32, with the scale.
    """
    return torch.addmm(weight.float(), up, down)
