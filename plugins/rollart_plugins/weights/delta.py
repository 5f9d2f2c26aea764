"""Weights as what has changed since the version before, over another channel.

    publish:  tensor by tensor, new against the copy of the last version -> changes + checksum
    fetch:    the base this end holds + changes -> tensor, checked
              no base, or another one: from the last full version on, through all that followed

Takes: tensors in the dtype they are published in. Gives: the same, bit for bit. Never: hands on a
tensor whose checksum fails.

Every tensor travels as bytes of :mod:`rollart_plugins.weights.codec`; the first of a version, under
a name no parameter has, says what the version builds on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_core.plugins import registry
from rollart_plugins.weights.codec import (
    Bytes,
    ChecksumMismatch,
    Coding,
    Compress,
    coding_of,
    decode,
    encode,
)
from rollart_plugins.weights.tensors import Tensors, dtype_name, dtype_of, raw

HEAD = "#delta"
Named = Iterator[tuple[str, torch.Tensor]]


class DeltaChannel(WeightChannel):
    """Changed elements only, checksummed, over another channel.

    Args:
        location: Of the channel beneath.
        over: Its id, or a mapping of id and options.
        keep: How many of the newest versions can be fetched.
        full_every: Every how many versions one is whole.
        compress: ``auto`` deflates what gets a tenth smaller, where few elements have changed;
            ``always`` also where many have; ``never`` nothing.
    """

    def __init__(
        self,
        location: str,
        over: str | dict[str, Any] = "shared-memory",
        keep: int = 2,
        full_every: int = 20,
        compress: Compress = "auto",
    ) -> None:
        if keep < 1 or full_every < 1:
            raise ValueError(f"keep ({keep}) and full_every ({full_every}) must be at least 1")
        options: dict[str, Any] = {"id": over} if isinstance(over, str) else dict(over)
        # The chain of the oldest version that is kept has to be there as well.
        options["keep"] = keep + full_every - 1
        channel_id = str(options.pop("id"))
        self._beneath: WeightChannel = registry.build(
            "weight_channels", channel_id, options, location=location
        )
        self._full_every = full_every
        self._compress: Compress = compress
        self._num_bytes = 0
        self._base: dict[str, torch.Tensor] = {}
        self._chain: list[int] = []
        """Of the version in ``_base``; empty: nothing there can be built on."""

    def publish(self, policy_version: int, tensors: Tensors) -> Publication:
        """Publish what has changed; see :class:`WeightChannel`."""
        began = time.perf_counter()
        chain = [*self._chain, policy_version]
        if len(chain) > self._full_every or chain != sorted(set(chain)):
            chain = [policy_version]
        is_full, self._chain = len(chain) == 1, []  # empty until all has gone well
        if is_full:
            self._base = {}
        self._num_bytes = 0
        beneath = self._beneath.publish(policy_version, self._written(chain, tensors))
        self._chain = chain
        self.moved_bytes = self._beneath.moved_bytes
        took = time.perf_counter() - began
        return Publication(policy_version, self._num_bytes, took, beneath.num_bytes)

    def fetch(self, policy_version: int) -> Named:
        """Return the tensors of a version; see :class:`WeightChannel`."""
        return self._tensors(policy_version, _opened(self._beneath, policy_version))

    def newest(self) -> int | None:
        """Return the version published last, if any."""
        return self._beneath.newest()

    def close(self) -> None:
        """Close the channel beneath and forget the base."""
        self._beneath.close()
        self._base, self._chain = {}, []

    def _written(self, chain: list[int], tensors: Tensors) -> Named:
        """Yield what travels, and keep a copy of each tensor for the next time."""
        yield HEAD, torch.frombuffer(bytearray(json.dumps(chain).encode()), dtype=torch.uint8)
        seen: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            new = tensor.detach().to("cpu").contiguous()
            old = self._base.get(name)
            if old is not None and (old.dtype, old.shape) != (new.dtype, new.shape):
                old = None
            coding = Coding(dtype_name(new.dtype), list(new.shape), self._compress)
            block = encode(_array(new), None if old is None else _array(old), coding)
            seen[name] = new.clone() if old is None else old.copy_(new)
            self._num_bytes += new.nbytes
            yield name, torch.frombuffer(bytearray(block), dtype=torch.uint8)
        self._base = seen

    def _tensors(self, policy_version: int, opened: _Opened) -> Named:
        """Yield a version: from the base if it is the right one, else from the last full one."""
        mine, self._chain = self._chain, []  # empty until all has come
        num_yielded, error = 0, ChecksumMismatch()
        for missing in _ways(mine, opened.chain):
            try:
                for version in missing[:-1]:
                    for _ in self._applied(_opened(self._beneath, version)):
                        pass
                last = opened if opened.is_fresh else _opened(self._beneath, policy_version)
                for i, (name, tensor) in enumerate(self._applied(last)):
                    if i >= num_yielded:
                        num_yielded = i + 1
                        yield name, tensor.clone()
            except ChecksumMismatch as e:
                error = e
            else:
                self._chain = opened.chain
                return
        raise ValueError(f"the weights of version {policy_version} are damaged: {error}")

    def _applied(self, opened: _Opened) -> Named:
        """Bring the base to a version, tensor by tensor; a full one needs none."""
        seen: dict[str, torch.Tensor] = {}
        for name, block in opened.blocks():
            self.moved_bytes = self._beneath.moved_bytes
            try:
                coding = coding_of(_array(block))
                known = self._base.get(name)
                target = _like(known, coding)
                is_base = len(opened.chain) > 1 and target is known
                decode(_array(block), _array(target) if is_base else None, _array(target))
            except ChecksumMismatch as e:
                raise ChecksumMismatch(f"{name!r}: {e}") from e
            seen[name] = target
            yield name, target
        self._base = seen


@dataclass(slots=True)
class _Opened:
    """A version of the channel beneath, with its head read."""

    chain: list[int]
    """From the last full version to this one; one alone is full."""
    entries: Named
    is_fresh: bool = True

    def blocks(self) -> Named:
        """Return what follows the head; once."""
        self.is_fresh = False
        return self.entries


def _opened(beneath: WeightChannel, policy_version: int) -> _Opened:
    entries = iter(beneath.fetch(policy_version))
    name, head = next(entries, ("", torch.empty(0, dtype=torch.uint8)))
    if name != HEAD:
        raise ValueError(f"version {policy_version} was not published by a delta channel")
    try:
        return _Opened(json.loads(_array(head).tobytes()), entries)
    except ValueError as e:
        raise ValueError(f"the weights of version {policy_version} are damaged: {e}") from e


def _ways(mine: list[int], chain: list[int]) -> Iterator[list[int]]:
    """Yield which versions to apply, in order: those that are missing; all since the full one."""
    if mine and len(mine) < len(chain) and chain[: len(mine)] == mine:
        yield chain[len(mine) :]
    yield chain


def _like(known: torch.Tensor | None, coding: Coding) -> torch.Tensor:
    dtype = dtype_of(coding.dtype)
    if known is not None and (known.dtype, list(known.shape)) == (dtype, coding.shape):
        return known
    return torch.empty(coding.shape, dtype=dtype)


def _array(tensor: torch.Tensor) -> Bytes:
    """Return the raw bytes ``[n]``; no copy."""
    array: Bytes = raw(tensor).numpy()
    return array
