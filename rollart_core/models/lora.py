"""Low-rank adapters as they travel, and the weights they make of a base (arXiv:2106.09685, eq. 3).

    trainer: A, scale * B  -- weight channel -->  engine: W + (scale * B) A, of a base it has itself

Takes: tensors as a channel yields them. Gives: whole weights, under transformers' names. Never:
trains, or needs peft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from rollart_core.models.weights import iter_weights, model_folder

A, B = ".lora_A.weight", ".lora_B.weight"
"""``model.layers.0.mlp.up_proj`` + this is the name of an adapter's tensor: ``[rank, in]`` and, the
scale ``alpha / rank`` within it, ``[out, rank]``."""
Named = Iterable[tuple[str, Tensor]]


def merge(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return ``weight + up @ down`` in float32.

    Args:
        weight: ``[out, in]``, of any dtype.
        down: ``[rank, in]`` float32.
        up: ``[out, rank]`` float32, with the scale.
    """
    return torch.addmm(weight.float(), up, down)


class AdapterBase:
    """The weights an engine began with, on which adapters are put; read when the first ones come.

    Args:
        model_path: A local folder or a hub id.
        device: Where products are computed: where the trainer's are, they have the same bits.
    """

    def __init__(self, model_path: str, device: torch.device) -> None:
        self._model_path, self._device = model_path, device
        self._held: dict[str, Tensor] = {}
        """As the files hold them: what the trainer reads is exactly this."""

    def whole(self, tensors: Named) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights for what a channel yields; those that are whole as they are.

        Raises:
            ValueError: When adapters are for weights that the base has not, or of another shape.
        """
        entries = iter(tensors)
        first = next(entries, None)
        if first is None:
            return
        given = chain([first], entries)
        yield from self._merged(dict(given)) if first[0].endswith((A, B)) else given

    def _merged(self, adapters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if not self._held:
            self._held = dict(iter_weights(model_folder(self._model_path)))
        pairs = _pairs(adapters)
        for name, (down, up) in pairs.items():
            _check(name, self._held.get(name), down, up)
        for name, weight in self._held.items():
            pair = pairs.get(name)
            yield name, weight if pair is None else self._merge(weight, *pair)

    def _merge(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return merge(*(t.to(self._device) for t in (weight, down, up)))


def _pairs(adapters: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both tensors of each adapter by the name of the weight they are for."""
    modules = {name.removesuffix(A).removesuffix(B) for name in adapters}
    lacking = [f"{m}{part}" for m in modules for part in (A, B) if f"{m}{part}" not in adapters]
    if lacking:
        raise ValueError(f"adapters lack {len(lacking)} tensors, such as {min(lacking)!r}")
    return {f"{m}.weight": (adapters[m + A], adapters[m + B]) for m in modules}


def _check(name: str, weight: Tensor | None, down: Tensor, up: Tensor) -> None:
    if weight is None:
        raise ValueError(f"an adapter is for {name!r}, which this model has not")
    found = (up.shape[0], down.shape[1])
    if tuple(weight.shape) != found or up.shape[1] != down.shape[0]:
        raise ValueError(f"the adapter for {name!r} makes {found}, it is {tuple(weight.shape)}")
