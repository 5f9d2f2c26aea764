"""Weights on their way into an engine: fetched, and prepared beside those in use.

Takes: a channel and a version. Gives: which version came, and how long it took. Never: touches the
weights in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from rollart_core.contracts.weights import WeightChannel
from rollart_core.models.lora import AdapterBase

Stage = Callable[[Iterable[tuple[str, torch.Tensor]]], int]
"""Prepares tensors one by one and returns their bytes."""


@dataclass(slots=True)
class Incoming:
    """What has come."""

    policy_version: int
    num_bytes: int
    fetch_s: float
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Empty where they are prepared already."""


def fetch(
    channel: WeightChannel,
    policy_version: int,
    stage: Stage | None,
    base: AdapterBase | None = None,
) -> Incoming:
    """Fetch a version; where the channel holds it no longer, the newest instead.

    That may have the same number: of a trainer that came back while it was fetched.

    Args:
        channel: Where from.
        policy_version: Which.
        stage: Prepares the tensors; None: they are returned.
        base: Makes whole weights of adapters, where those may come.

    Raises:
        LookupError: When there is neither.
        ValueError: When they do not fit the model, or are damaged.
    """
    began = time.perf_counter()
    try:
        incoming = _take(channel, policy_version, stage, base)
    except LookupError:
        newest = channel.newest()
        if newest is None:
            raise
        incoming = _take(channel, newest, stage, base)
    incoming.fetch_s = time.perf_counter() - began
    return incoming


def _take(
    channel: WeightChannel, policy_version: int, stage: Stage | None, base: AdapterBase | None
) -> Incoming:
    tensors = channel.fetch(policy_version)
    try:
        whole = tensors if base is None else base.whole(tensors)
        if stage is not None:
            return Incoming(policy_version, stage(whole), 0.0)
        held = list(whole)
        return Incoming(policy_version, sum(t.nbytes for _, t in held), 0.0, held)
    finally:
        close = getattr(tensors, "close", None)
        if close is not None:
            close()  # where they are refused half way, others may wait for this end to go on
