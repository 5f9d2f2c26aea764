"""The output head: logprobs and entropies of tokens from hidden states, without all logits.

    hidden [R, H] --chunk of rows--> logits [r, V] --> logprobs, entropies [r]     (forward)
                                     logits again  --> gradients of hidden, weight (backward)

The logits of 32,000 tokens and a vocabulary of 152,000 take 19 GB in float32, and a backward pass
through them takes several times that. One chunk takes at most :data:`CHUNK_BYTES`, and is computed
again in the backward pass. Logits that fit in one chunk are computed once, as they were before.

Some models scale their logits (Granite, Cohere) or cap them (Gemma 2, arXiv 2408.00118, section 2:
``cap tanh(z / cap)``). This is part of each chunk. It is read from the outputs of given logits.

Takes: hidden states and a linear head, or a model whose forward pass ends with one. Gives: logprobs
and entropies with gradients. Never: changes the model, except within :meth:`Head.replaced`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

CHUNK_BYTES = 256 * 2**20
"""Maximum size of the float32 logits of one chunk."""
_LARGE = 60.0
"""Larger than the logits of trained models, so that a soft cap changes it."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of soft caps in the configs of transformers."""


class Targets(NamedTuple):
    """The tokens to score; several may follow the same position."""

    rows: Tensor
    """``[P]`` int64: the position in ``R`` that a token follows."""
    tokens: Tensor
    """``[P]`` int64."""

    @classmethod
    def one_per_row(cls, tokens: Tensor) -> Targets:
        """Return the targets of positions with one token each, ``[R]``."""
        return cls(torch.arange(len(tokens), device=tokens.device), tokens)


class Scoring(NamedTuple):
    """How logits become logprobs."""

    temperature: float = 1.0
    """Divisor of the logits."""
    entropy_gradient: bool = False
    """Whether the entropy is differentiable."""
    compute_dtype: torch.dtype | None = None
    """Dtype of the products with the head; None: that of the hidden states."""
    scale: float = 1.0
    """Factor of the logits, before the cap."""
    cap: float | None = None
    """Soft cap of the scaled logits, before the temperature."""


class Head:
    """The output head of a transformers causal LM.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        module = model.get_output_embeddings()  # type: ignore[operator]
        self._module: Any = module if type(module) is nn.Linear else None
        self._after: Scoring | None = None
        self._is_tried = self._module is None

    def in_chunks(self, num_rows: int) -> bool:
        """Return whether the logits of so many positions are too large to be computed at once."""
        return self._module is not None and num_rows > chunk_rows(self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, which is the number of rows of the head."""
        return int(self._module.out_features)

    def knows_model(self, output: Callable[[], Tensor]) -> bool:
        """Return whether the model only scales or caps the output of its head; tried once.

        With several ranks, each must call it before the same forward pass.

        Args:
            output: Runs the model on two tokens and returns its logits ``[1, 2, V]``.
        """
        if not self._is_tried:
            self._is_tried, device = True, self._module.weight.device
            tried = torch.linspace(-_LARGE, _LARGE, self.num_tokens, device=device).double()
            with torch.no_grad(), self.replaced(lambda hidden: tried.expand(1, 2, -1)):
                self._after = self._explained(tried, output()[0, -1].double())
        return self._after is not None

    def _explained(self, given: Tensor, found: Tensor) -> Scoring | None:
        """Return the scale or cap by which the model changed logits ``[V]``; None if by others."""
        config: Any = self.model.config
        caps = [getattr(config.get_text_config(), key, None) for key in _CAPS]
        last = Scoring(scale=float(found[-1] / given[-1]))
        for after in (Scoring(), *(Scoring(cap=float(cap)) for cap in caps if cap), last):
            wanted, _ = _adjust(given.clone(), after)
            if torch.allclose(found, wanted, rtol=1e-6, atol=1e-6):
                return after
        return None

    @contextmanager
    def replaced(self, by: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Replace the head within the block: the model returns ``by(hidden)`` as its logits.

        The block must contain the forward pass only. FSDP2 has gathered the head's weight then.
        """
        module = self._module
        assert module is not None
        module.forward = by
        try:
            yield
        finally:
            del module.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` of hidden states ``[..., H]``."""
        return linear(hidden, self._module.weight, self._module.bias)

    def score(self, hidden: Tensor, targets: Targets, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Return logprobs of the targets ``[P]``, and entropies ``[R]``, float32.

        Args:
            hidden: ``[R, H]``.
            targets: The tokens.
            scoring: How logits become logprobs.
        """
        weight, bias = self._module.weight, self._module.bias
        if self._after is not None:
            scoring = scoring._replace(scale=self._after.scale, cap=self._after.cap)
        return score_in_chunks(hidden, (weight, bias), targets, scoring)


def chunk_rows(num_tokens: int) -> int:
    """Return the number of rows of a chunk, for a vocabulary of this size."""
    return max(1, CHUNK_BYTES // (4 * num_tokens))


def score_in_chunks(
    hidden: Tensor, head: tuple[Tensor, Tensor | None], targets: Targets, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return logprobs of the targets ``[P]``, and entropies ``[R]``, at least float32.

    Args:
        hidden: ``[R, H]``.
        head: Weight ``[V, H]`` and bias ``[V]`` or None.
        targets: The tokens to score.
        scoring: How logits become logprobs.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    scoring = scoring._replace(compute_dtype=scoring.compute_dtype or dtype)
    found: tuple[Tensor, Tensor] = _Chunked.apply(hidden, *head, *targets, scoring)  # type: ignore[no-untyped-call]
    return found


def score(
    logits: Tensor, targets: Targets, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return logprobs of the targets ``[P]``, and each row's entropy ``[R]``.

    Args:
        logits: ``[R, V]`` float32, already divided by the temperature.
        targets: The tokens to score.
        entropy_gradient: Whether the entropy is differentiable.
    """
    function = _LogProbsAndEntropy if entropy_gradient else _LogProbs
    return function.apply(logits, *targets)  # type: ignore[no-any-return,no-untyped-call]


class _LogProbsAndEntropy(torch.autograd.Function):
    """Like :class:`_LogProbs`, with the entropy's gradient ``dH/dz_j = -p_j (log p_j + H)``."""

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


class _Chunked(torch.autograd.Function):
    """The head and :class:`_LogProbsAndEntropy`, in chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        tokens: Tensor,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        ctx.scoring = scoring
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = hidden.new_empty(len(tokens), dtype=dtype)
        entropies = []
        matrix = weight.to(scoring.compute_dtype or hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for start, stop in _chunks(len(hidden), len(weight)):
                logp, _ = _log_probs(hidden[start:stop], matrix, bias, scoring)
                pairs = _pairs(rows, start, stop)
                values[pairs] = logp[rows[pairs] - start, tokens[pairs]]
                entropies.append(-torch.einsum("rv,rv->r", logp.exp(), logp))
                del logp  # before the next chunk
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, rows, tokens, entropy)
        if not scoring.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return values, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, rows, tokens, entropy = ctx.saved_tensors
        scoring: Scoring = ctx.scoring
        matrix = weight.to(scoring.compute_dtype or hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]  # not with adapters
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if is_trained else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=grad.dtype)
        for start, stop in _chunks(len(hidden), len(weight)):
            pairs = _pairs(rows, start, stop)
            grad_logits = _logit_gradients(
                _log_probs(hidden[start:stop], matrix, bias, scoring),
                Targets(rows[pairs] - start, tokens[pairs]),
                grad[pairs],
                (entropy[start:stop], grad_entropy[start:stop]),
                scoring,
            )
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            rounded = grad_logits.to(matrix.dtype)
            grad_hidden[start:stop] = rounded @ matrix
            if grad_weight is not None:
                _add_product(grad_weight, rounded, hidden[start:stop].to(matrix.dtype))
            del grad_logits, rounded  # before the next chunk
        if grad_bias is not None and bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _chunks(num_rows: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    size = chunk_rows(num_tokens)
    for start in range(0, num_rows, size):
        yield start, min(start + size, num_rows)


def _pairs(rows: Tensor, start: int, stop: int) -> Tensor:
    """Return the indices of the targets that follow the positions ``start`` to ``stop``."""
    return ((rows >= start) & (rows < stop)).nonzero()[:, 0]


def _log_probs(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """Return the logprobs ``[r, V]`` of a chunk, at least float32, and the slope of the cap."""
    logits = hidden.to(matrix.dtype) @ matrix.T
    if bias is not None:
        logits += bias.to(logits.dtype)
    logits = logits.to(torch.promote_types(hidden.dtype, torch.float32))
    logits, slope = _adjust(logits, scoring)
    return torch.log_softmax(logits, dim=-1), slope


def _logit_gradients(
    found: tuple[Tensor, Tensor | None],
    targets: Targets,
    grad: Tensor,
    entropies: tuple[Tensor, Tensor],
    scoring: Scoring,
) -> Tensor:
    """Return the gradient ``[r, V]`` of a chunk's output of the head.

    Args:
        found: The result of :func:`_log_probs`, which is overwritten.
        targets: The chunk's targets.
        grad: The gradients of their logprobs.
        entropies: The entropies ``[r]``, and their gradients.
        scoring: How logits become logprobs.
    """
    logp, slope_of_cap = found
    total = grad.new_zeros(len(logp)).index_add_(0, targets.rows, grad)[:, None]
    probs = logp.exp()
    if scoring.entropy_gradient:
        entropy, grad_entropy = entropies
        probs.mul_(logp.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(total))
    else:
        probs.mul_(total)
    probs.neg_().index_put_((targets.rows, targets.tokens), grad, accumulate=True)
    probs.mul_(scoring.scale / scoring.temperature)
    return probs if slope_of_cap is None else probs.mul_(slope_of_cap)


def _adjust(logits: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Scale, cap and divide logits in place; return the slope of the cap too."""
    slope = None
    if scoring.scale != 1.0:
        logits.mul_(scoring.scale)
    if scoring.cap is not None:
        logits.div_(scoring.cap).tanh_()
        slope = 1 - logits * logits
        logits.mul_(scoring.cap)
    if scoring.temperature != 1.0:
        logits.div_(scoring.temperature)
    return logits, slope


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to ``total``, which may have a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
