"""Forward passes: logprobs of the loss tokens of token rows.

============ ===================================================== =============================
class        models                                                work
============ ===================================================== =============================
of a plugin  its own choice (``rollart list forward_passes``)      its own
PackedPolicy models that take a custom attention function          no padding
PaddedPolicy any causal LM of transformers                         rows padded to the longest
============ ===================================================== =============================

Packed rows are concatenated in one input row; position ids restart with each row. Attention is
causal within a row and masked across rows. Only for attention, the rows are padded to the longest
row of their length bucket. :mod:`rollart_core.training.head` computes logprobs and entropies.

Takes: samples. Gives: logprobs and entropies ``[K]`` of their loss tokens, in row order, float32;
and, on request, the last hidden states ``[K, H]`` before them. Never: updates anything, or lets a
packed row attend to another.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollart_core.training.batch import balance, level, model_input, pack
from rollart_core.training.head import Head, Scoring, Targets, score
from rollart_core.types import IntArray, Sample

Index = npt.NDArray[np.int64]
Kernels = Literal["auto", "native", "torch"]

PACKED_ATTENTION = "rollart_packed"
_UNSUPPORTED_ATTENTION = ("softcap", "s_aux", "position_bias")
_OWN_ATTENTION = ("nemotron",)
"""Model types that do not pass the layout of the rows on to their attention."""


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """The settings that determine, with the model, how logprobs are computed."""

    temperature: float = 1.0
    """Divisor of the logits."""
    autocast: bool = False
    """Whether matrix products run in bfloat16."""
    recompute: bool = False
    """Whether the backward pass recomputes activations."""
    world_size: int = 1
    """Number of ranks over which the weights are sharded."""
    kernels: Kernels = "auto"
    """``trainer.kernels`` of the config, for forward passes with compiled functions."""


class Read(NamedTuple):
    """The output of a model for some rows; ``R`` positions are followed by a loss token."""

    logprobs: Tensor
    """``[P]``: the logprob of each (position, target) pair."""
    entropy: Tensor
    """``[R]``: the entropy at each position."""
    rows: Tensor
    """``[P]``: the index in ``R`` of each pair."""
    pairs: Tensor
    """``[K]``: the pair of each loss token."""
    hidden: Tensor | None = None
    """``[R, H]``: the hidden states of the positions; None if not requested."""


class Positions(NamedTuple):
    """The positions before loss tokens in the output of a forward pass."""

    tokens: Tensor
    """``[R]`` int64: the loss tokens."""
    num_computed: int
    """Number of positions for which the model computes logits."""
    keep: Tensor | None = None
    """``[R]`` int64: the index of each position; None: they are all positions of the output."""

    def of(self, output: Tensor) -> Tensor:
        """Return the rows ``[R, X]`` of an output ``[B, T, X]``."""
        flat = output.flatten(0, 1)
        return flat if self.keep is None else flat[self.keep]


Scores: TypeAlias = tuple[Tensor, Tensor]
"""Logprobs ``[P]`` and entropies ``[R]``."""


class Policy(ABC):
    """A model with a forward pass that computes its logprobs.

    Args:
        model: A transformers causal LM.
        settings: The settings of the forward pass.
    """

    def __init__(self, model: nn.Module, settings: ForwardSettings) -> None:
        self.model = model
        self.temperature = settings.temperature
        self.computed_tokens = 0
        """Number of tokens processed by the model, after sharing and before padding."""
        self.head = Head(model)
        self._autocast = settings.autocast
        self._device_type = next(model.parameters()).device.type

    @classmethod
    @abstractmethod
    def fits(cls, model: nn.Module, settings: ForwardSettings) -> bool:
        """Return whether this forward pass is correct for ``model`` with these settings."""

    @property
    def hidden_size(self) -> int:
        """Width of the last hidden states."""
        config: Any = self.model.config
        return int(config.hidden_size)

    @abstractmethod
    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Return bins of indices with at most ``budget`` computed tokens (a longer row is alone).

        For several ranks, each gets the same number of bins, if there are enough samples, and
        similar costs.
        """

    @abstractmethod
    def read(
        self, samples: Sequence[Sample], *, hidden: bool = False, entropy_gradient: bool = False
    ) -> Read:
        """Return logprobs and entropies of loss tokens, and the hidden states on request."""

    def score(self, hidden: Tensor, targets: Targets, *, entropy_gradient: bool) -> Scores:
        """Return logprobs ``[P]`` and entropies ``[R]`` from hidden states ``[R, H]``."""
        if self.head.in_chunks(len(hidden)):
            return self.head.score(hidden, targets, Scoring(self.temperature, entropy_gradient))
        return self._of_logits(self.head(hidden), targets, entropy_gradient)

    def score_output(
        self, output: Callable[[], Tensor], positions: Positions, *, entropy_gradient: bool
    ) -> Scores:
        """Return logprobs and entropies ``[R]`` from a forward pass of the whole model.

        Args:
            output: Runs the model and returns its logits ``[B, T, V]``.
            positions: The positions to score, one token each.
            entropy_gradient: Whether the entropy is differentiable.
        """
        targets = Targets.one_per_row(positions.tokens)
        # Tried before any rank has a large batch: a forward pass is a collective call.
        is_known = self.head.knows_model(self._try_output)
        if not (is_known and self.head.in_chunks(positions.num_computed)):
            logits = positions.of(output())
            return self._of_logits(logits, targets, entropy_gradient)
        scoring = Scoring(self.temperature, entropy_gradient)
        scores: list[Scores] = []

        def scored(hidden: Tensor) -> Tensor:
            scores.append(self.head.score(positions.of(hidden), targets, scoring))
            return torch.stack(scores[0], dim=-1)[None]

        with self.head.replaced(scored):
            returned = output()  # the model may have scaled it
        ((logprobs, entropy),) = scores
        # FSDP2 hooks the backward pass at the model's output, so that must be part of the graph.
        logprobs = logprobs + 0.0 * returned.sum()
        return logprobs, entropy if entropy_gradient else entropy.detach()

    def _try_output(self) -> Tensor:
        """Return the logits ``[1, 2, V]`` of two tokens."""
        device = next(self.model.parameters()).device
        ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    def _of_logits(self, logits: Tensor, targets: Targets, entropy_gradient: bool) -> Scores:
        logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return score(logits, targets, entropy_gradient=entropy_gradient)

    def logprobs(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies (without gradient) of all loss tokens, ``[K]`` each."""
        values, entropy, _ = self.outputs(samples)
        return values, entropy

    def outputs(
        self, samples: Sequence[Sample], *, hidden: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the result of :meth:`logprobs`, and the last hidden states ``[K, H]`` on request.

        The hidden states are those before the loss tokens, float32, with gradient. With
        ``entropy_gradient``, the entropy has a gradient too.
        """
        with self._context():
            read = self.read(samples, hidden=hidden, entropy_gradient=entropy_gradient)
        states = None if read.hidden is None else read.hidden.float()[read.rows][read.pairs]
        return read.logprobs[read.pairs], read.entropy[read.rows][read.pairs], states

    def hidden(self, samples: Sequence[Sample]) -> Tensor:
        """Return only the last hidden states ``[K, H]``, and compute few logits."""
        with self._context():
            states, output = self.states(samples)
        if output is None:
            return states.float()
        # FSDP2 hooks the backward pass at the model's output, so that must be part of the graph.
        return states.float() + 0.0 * output.float().sum()

    def states(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
        """Return hidden states ``[K, H]``, and a part of the model's own output or None."""
        read = self.read(samples, hidden=True)
        assert read.hidden is not None
        return read.hidden[read.rows][read.pairs], read.logprobs[:1]

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Use another temperature within the block."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before

    def _context(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device_type, torch.bfloat16, enabled=self._autocast)


class PackedPolicy(Policy):
    """A forward pass on concatenated rows, without padding, in one row of the model's input."""

    def __init__(self, model: nn.Module, settings: ForwardSettings) -> None:
        super().__init__(model, settings)
        install_packed_attention(model)

    @classmethod
    def fits(cls, model: nn.Module, settings: ForwardSettings) -> bool:
        """See :meth:`Policy.fits`."""
        return supports_packing(model)

    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Return bins by the number of tokens that the model must read; see :class:`Policy`."""
        costs = [len(model_input(s)) for s in samples]
        return pack(costs, budget) if num_ranks == 1 else balance(costs, budget, num_ranks)

    def read(
        self, samples: Sequence[Sample], *, hidden: bool = False, entropy_gradient: bool = False
    ) -> Read:
        """See :meth:`Policy.read`."""
        inputs, keep, tokens = self._placed(samples)
        positions = Positions(tokens, len(tokens))
        with _last_hidden(self.model, wanted=hidden) as seen:
            scores = self.score_output(
                lambda: packed_forward(self.model, inputs, keep)[None],
                positions,
                entropy_gradient=entropy_gradient,
            )
        each = torch.arange(len(tokens), device=tokens.device)
        return Read(*scores, each, each, seen[-1][0, keep] if hidden else None)

    def states(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Policy.states`."""
        inputs, keep, _ = self._placed(samples)
        with _last_hidden(self.model, wanted=True) as seen:
            logits = packed_forward(self.model, inputs, keep[:1])
        return seen[-1][0, keep], logits

    def _try_output(self) -> Tensor:
        """See :meth:`Policy._try_output`."""
        keep = torch.arange(2, device=next(self.model.parameters()).device)
        return packed_forward(self.model, [np.zeros(2, dtype=np.int32)], keep)[None]

    def _placed(self, samples: Sequence[Sample]) -> tuple[list[IntArray], Tensor, Tensor]:
        """Return the rows, the position before each loss token ``[K]``, and the token ``[K]``."""
        inputs = [model_input(s) for s in samples]
        self.computed_tokens += sum(len(row) for row in inputs)
        positions, targets = loss_tokens(samples)
        starts = np.cumsum([0, *(len(row) for row in inputs)])
        at = np.concatenate([s + p - 1 for s, p in zip(starts[:-1], positions, strict=True)])
        device = next(self.model.parameters()).device
        keep, tokens = index_tensors(device, at, np.concatenate(targets))
        return inputs, keep, tokens


class PaddedPolicy(Policy):
    """A forward pass on rows padded on the right to the longest, with an attention mask."""

    @classmethod
    def fits(cls, model: nn.Module, settings: ForwardSettings) -> bool:
        """Return True: it works with any model."""
        return True

    def microbatches(
        self, samples: Sequence[Sample], budget: int, num_ranks: int = 1
    ) -> list[list[int]]:
        """Return bins by the number of tokens including padding; see :class:`Policy`."""
        lengths = [len(model_input(s)) for s in samples]
        bins: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > budget:
                bins.append([])
            bins[-1].append(i)
        return level(bins, num_ranks)

    def read(
        self, samples: Sequence[Sample], *, hidden: bool = False, entropy_gradient: bool = False
    ) -> Read:
        """See :meth:`Policy.read`."""
        inputs = [model_input(s) for s in samples]
        self.computed_tokens += sum(len(row) for row in inputs)
        positions, targets = loss_tokens(samples)
        width = max(len(row) for row in inputs)
        ids, mask = np.zeros((2, len(inputs), width), dtype=np.int64)
        for n, row in enumerate(inputs):
            ids[n, : len(row)], mask[n, : len(row)] = row, 1
        at = np.concatenate([n * width + p - 1 for n, p in enumerate(positions)])
        device = next(self.model.parameters()).device
        input_ids, attention_mask, keep, tokens = index_tensors(
            device, ids, mask, at, np.concatenate(targets)
        )

        def output() -> Tensor:
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            return out.logits  # type: ignore[no-any-return]

        wanted = Positions(tokens, input_ids.numel(), keep)
        with _last_hidden(self.model, wanted=hidden) as seen:
            scores = self.score_output(output, wanted, entropy_gradient=entropy_gradient)
        each = torch.arange(len(tokens), device=device)
        states = seen[-1].flatten(0, 1)[keep] if hidden else None
        return Read(*scores, each, each, states)


def new_policy(model: nn.Module, settings: ForwardSettings) -> Policy:
    """Return a model with the first forward pass that fits it: a plugin's, or a built-in one.

    Raises:
        PluginError: If the class of a registered forward pass cannot be imported.
    """
    from rollart_core.plugins import registry  # the tests on GPUs run without pydantic

    found = registry.others_first("forward_passes")
    classes: list[type[Policy]] = [registry.resolve("forward_passes", r.key) for r in found]
    classes.append(PackedPolicy)
    for cls in classes:
        if cls.fits(model, settings):
            return cls(model, settings)
    return PaddedPolicy(model, settings)


@contextmanager
def _last_hidden(model: nn.Module, *, wanted: bool) -> Iterator[list[Tensor]]:
    """Collect the output of a transformers model's decoder, ``[B, T, H]``."""
    seen: list[Tensor] = []
    if not wanted:
        yield seen
        return
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    hook = decoder.register_forward_hook(lambda module, given, said: seen.append(said[0]))
    try:
        yield seen
    finally:
        hook.remove()


def loss_tokens(samples: Sequence[Sample]) -> tuple[list[Index], list[IntArray]]:
    """Return the positions of each sample's loss tokens, and their token ids."""
    positions = [np.flatnonzero(s.loss_mask).astype(np.int64) for s in samples]
    targets = [s.token_ids[at] for s, at in zip(samples, positions, strict=True)]
    return positions, targets


def index_tensors(device: torch.device, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    """Return arrays as int64 tensors on a device."""
    return tuple(torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The layout of the rows, for attention."""

    gather: tuple[Tensor, ...]
    """For each bucket ``[n, L]``: the token index of each slot (0 if padded)."""
    slots: Tensor
    """``[N]``: the slot of each token among the slots of all buckets, in order."""


def supports_packing(model: nn.Module) -> bool:
    """Return whether packed rows have the same result as the model for each row alone."""
    config: Any = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        getattr(model, "_supports_attention_backend", False)
        and "logits_to_keep" in inspect.signature(model.forward).parameters
        and layer_types == {"full_attention"}
        and not getattr(model, "_is_stateful", False)  # recurrent state would cross rows
        and getattr(config, "is_decoder", True)
        and config.model_type not in _OWN_ATTENTION
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "attn_logit_softcapping", None)
    )


def install_packed_attention(model: nn.Module) -> None:
    """Make the model use packed attention."""
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)  # type: ignore[operator]


def packed_layout(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """Return the layout of rows of these lengths; rows of similar length share a bucket."""
    starts = np.cumsum([0, *lengths])
    by_size: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_size.setdefault(-(-length // 128), []).append(i)
    gather, slots, first = [], np.empty(starts[-1], dtype=np.int64), 0
    for _, rows in sorted(by_size.items()):
        width = max(lengths[i] for i in rows)
        index = np.zeros((len(rows), width), dtype=np.int64)
        for n, i in enumerate(rows):
            index[n, : lengths[i]] = np.arange(starts[i], starts[i + 1])
            slots[starts[i] : starts[i + 1]] = first + n * width + np.arange(lengths[i])
        gather.append(torch.from_numpy(index).to(device))
        first += index.size
    return PackedRows(tuple(gather), torch.from_numpy(slots).to(device))


def packed_forward(model: nn.Module, rows: Sequence[IntArray], keep: Tensor) -> Tensor:
    """Return the logits ``[K, V]`` after the tokens ``keep`` ``[K]`` of the packed rows."""
    lengths = [len(row) for row in rows]
    tokens = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(keep.device)
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(keep.device)
    out = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        logits_to_keep=keep,
        use_cache=False,
        packed_rows=packed_layout(lengths, keep.device),
    )
    return out.logits[0]  # type: ignore[no-any-return]


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend within rows; ``[1, H, N, D]`` in, ``[1, N, H, D]`` out."""
    if packed_rows is None or any(kwargs.get(name) is not None for name in _UNSUPPORTED_ATTENTION):
        raise NotImplementedError(
            f"{type(module).__name__} uses attention features that packing does not support"
        )
    outs = []
    for index in packed_rows.gather:
        q, k, v = (t[0].transpose(0, 1)[index].transpose(1, 2) for t in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[packed_rows.slots][None], None
