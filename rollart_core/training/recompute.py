"""Activation checkpointing: a layer keeps its input alone, and computes itself again for backward.

Takes: a transformers causal LM. Gives: the same model, with the same parameter names. Never:
changes a number; it costs one more forward pass of each layer.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from rollart_core.training.distributed import decoder_layers


def recompute_activations(model: nn.Module) -> None:
    """Make every layer of the model forget its activations between forward and backward.

    Call it before the layers are sharded: what FSDP2 gathers for backward serves both.
    """
    for layer in decoder_layers(model):
        # There is no dropout, so no state of random numbers is to be kept.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
