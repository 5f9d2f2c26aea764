"""Fetch new weights for an engine, and prepare them while the current ones are in use.

Takes: a channel and a version. Gives: the fetched version and the duration. For low-rank adapters
(arXiv:2106.09685, equation 3), it merges them with the base weights to full weights.
Never: changes the weights in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import TypeVar

import torch

from rollart_core.contracts.weights import Broadcast, WeightChannel
from rollart_core.models.lora import A, B, merge
from rollart_core.models.weights import iter_weights, model_folder
from rollart_plugins.weights.tensors import dtype_of

T = TypeVar("T")
Named = Iterable[tuple[str, torch.Tensor]]
Stage = Callable[[Named, Sequence[Path] | None], int]
"""Prepares tensors one by one and returns their total number of bytes. It also receives the files
of :meth:`WeightChannel.files`."""


@dataclass(slots=True)
class Incoming:
    """The result of a fetch."""

    policy_version: int
    num_bytes: int
    fetch_s: float
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Empty if the tensors are already prepared."""
    broadcast: Broadcast | None = None
    """Not None: the server receives the tensors itself."""


def fetch(
    channel: WeightChannel,
    policy_version: int,
    stage: Stage | None,
    base: AdapterBase | None = None,
) -> Incoming:
    """Fetch a version, or the newest one if the channel no longer has that version.

    The newest version can have the same number, if a trainer restarted during the fetch.

    Args:
        channel: The channel.
        policy_version: The version.
        stage: Prepares the tensors. None: they are returned.
        base: Base weights to merge adapters with, if the channel can contain adapters.

    Raises:
        LookupError: If the channel has neither.
        ValueError: If the tensors do not fit the model, or are corrupt.
    """
    began = time.perf_counter()
    incoming = _this_or_newest(channel, policy_version, lambda v: _take(channel, v, stage, base))
    incoming.fetch_s = time.perf_counter() - began
    return incoming


def request_broadcast(
    channel: WeightChannel, policy_version: int, num_ranks: int
) -> Incoming | None:
    """Request a broadcast of a version, or of the newest one, to the processes of a server.

    Returns:
        None if the channel cannot broadcast.

    Raises:
        LookupError: If the channel has neither version.
    """
    began = time.perf_counter()
    broadcast = _this_or_newest(channel, policy_version, lambda v: channel.broadcast(v, num_ranks))
    if broadcast is None:
        return None
    sizes = (
        prod(shape) * dtype_of(dtype).itemsize
        for bucket in broadcast.buckets
        for _, dtype, shape in bucket
    )
    fetch_s = time.perf_counter() - began
    return Incoming(broadcast.policy_version, sum(sizes), fetch_s, broadcast=broadcast)


def _this_or_newest(channel: WeightChannel, policy_version: int, take: Callable[[int], T]) -> T:
    """Take a version, or the newest one if the channel no longer has that version."""
    try:
        return take(policy_version)
    except LookupError:
        newest = channel.newest()
        if newest is None:
            raise
        return take(newest)


def _take(
    channel: WeightChannel, policy_version: int, stage: Stage | None, base: AdapterBase | None
) -> Incoming:
    files = channel.files(policy_version)
    tensors = channel.fetch(policy_version)
    try:
        whole = tensors if base is None else base.whole(tensors)
        if stage is not None:
            return Incoming(policy_version, stage(whole, files), 0.0)
        held = list(whole)
        return Incoming(policy_version, sum(t.nbytes for _, t in held), 0.0, held)
    finally:
        close = getattr(tensors, "close", None)
        if close is not None:
            close()  # after a rejection half way, other engines can be waiting for this one


class AdapterBase:
    """The initial weights of an engine, to merge adapters with.

    They are read when the first adapters arrive.

    Args:
        model_path: A local folder or a hub id.
        device: Device of the matrix products. On the trainer's device, the result is bitwise equal.
    """

    def __init__(self, model_path: str, device: torch.device) -> None:
        self._model_path, self._device = model_path, device
        self._held: dict[str, torch.Tensor] = {}
        """The weights as in the files, which is exactly what the trainer reads."""

    def whole(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights for the tensors of a channel; full tensors are unchanged.

        Raises:
            ValueError: If an adapter's weight is not in the base, or has another shape.
        """
        entries = iter(tensors)
        first = next(entries, None)
        if first is None:
            return
        given = chain([first], entries)
        yield from self._merged(dict(given)) if first[0].endswith((A, B)) else given

    def _merged(self, adapters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._held:
            self._held = dict(iter_weights(model_folder(self._model_path)))
        pairs = _pairs(adapters)
        for name, (down, up) in pairs.items():
            _check(name, self._held.get(name), down, up)
        for name, weight in self._held.items():
            if name in pairs:
                weight = merge(*(t.to(self._device) for t in (weight, *pairs[name])))
            yield name, weight


def _pairs(adapters: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return both tensors of each adapter by the name of its weight."""
    modules = {name.removesuffix(A).removesuffix(B) for name in adapters}
    lacking = [f"{m}{part}" for m in modules for part in (A, B) if f"{m}{part}" not in adapters]
    if lacking:
        raise ValueError(f"adapters lack {len(lacking)} tensors, such as {min(lacking)!r}")
    return {f"{m}.weight": (adapters[m + A], adapters[m + B]) for m in modules}


def _check(name: str, weight: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor) -> None:
    if weight is None:
        raise ValueError(f"an adapter is for {name!r}, which this model does not have")
    found = (up.shape[0], down.shape[1])
    if tuple(weight.shape) != found or up.shape[1] != down.shape[0]:
        raise ValueError(
            f"the adapter for {name!r} has shape {found}, but the weight has {tuple(weight.shape)}"
        )
