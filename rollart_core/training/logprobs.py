"""Logprobs and entropies of logits, with backward passes by hand.

torch's eager autograd would save and re-read several ``[R, V]`` tensors more.

Takes and gives: torch tensors, on any device. Never: holds parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _LogProbsAndEntropy(torch.autograd.Function):
    """As :class:`_LogProbs`, with the gradient of the entropy: ``dH/dz_j = -p_j (log p_j + H)``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits, dim=-1)
        entropy = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(logp, entropy, rows, targets)
        return logp[rows, targets], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logp, entropy, rows, targets = ctx.saved_tensors
        total = grad.new_zeros(len(logp)).index_add_(0, rows, grad)
        slope = (logp + entropy[:, None]).mul_(grad_entropy[:, None]).add_(total[:, None])
        grad_logits = slope.mul_(logp.exp()).neg_()
        return grad_logits.index_put_((rows, targets), grad, accumulate=True), None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits, dim=-1)
        probs = logp.exp()
        ctx.save_for_backward(probs, rows, targets)
        entropy = -(probs * logp).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return logp[rows, targets], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probs, rows, targets = ctx.saved_tensors
        total = grad.new_zeros(len(probs)).index_add_(0, rows, grad)
        grad_logits = probs * -total[:, None]
        return grad_logits.index_put_((rows, targets), grad, accumulate=True), None, None


def logprobs(
    logits: Tensor, rows: Tensor, targets: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return logprobs of (row, target) pairs ``[P]``, and each row's entropy ``[R]``.

    Args:
        logits: ``[R, V]`` float32, already divided by the temperature.
        rows: ``[P]`` int64.
        targets: ``[P]`` int64.
        entropy_gradient: Whether the entropy is differentiable too.
    """
    function = _LogProbsAndEntropy if entropy_gradient else _LogProbs
    return function.apply(logits, rows, targets)  # type: ignore[no-any-return,no-untyped-call]
