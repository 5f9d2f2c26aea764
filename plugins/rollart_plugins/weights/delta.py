"""Weights as the changes since the previous version, over another channel.

    publish:  compare each tensor with the copy of the last version -> changes + checksum
    fetch:    the local base + changes -> tensor, verified
              no base, or another one: all versions since the last full one

Takes: tensors in their published dtype. Gives: bitwise equal tensors. Never: returns a tensor whose
checksum does not match.

Every tensor is sent as bytes of :mod:`rollart_plugins.weights.delta`. The first tensor of a version
has a name that no parameter has; it contains the versions on which this one is based.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_core.plugins import registry
from rollart_plugins.weights.tensors import Tensors, dtype_name, dtype_of, raw

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[Any]

_WIDTHS: dict[int, type[np.signedinteger[Any]]] = {
    1: np.int8,
    2: np.int16,
    4: np.int32,
    8: np.int64,
}
Compress = Literal["auto", "always", "never"]

_GO_ON = 255
_WIDE = -128
_PAYS = 0.9
"""Compressed bytes are used if they are at most this share."""
_SAMPLE_BYTES = 1 << 16
_WORTH_IT = 16
"""``auto`` compresses changes of at most this fraction of a tensor. For more changes, the
compression takes longer than the transfer."""


class ChecksumMismatch(ValueError):
    """The result is not the original tensor: the base is another one, or the data is corrupt."""


@dataclass(frozen=True, slots=True)
class Coding:
    """The metadata of a tensor, and how to compress it."""

    dtype: str
    shape: list[int]
    compress: Compress = "auto"


def encode(new: Bytes, old: Bytes | None, coding: Coding) -> bytes:
    """Encode ``new``.

    Args:
        new: ``[n]``; the raw bytes of the tensor.
        old: ``[n]``; the bytes that the reader has. None: it has none.
        coding: The metadata and compression.
    """
    pieces: dict[str, Bytes] = {"whole": new}
    if old is not None:
        kind = _kind(new.nbytes, coding.shape)
        changed = _changes(new.view(kind), old.view(kind))
        if sum(p.nbytes for p in changed.values()) < new.nbytes or not new.nbytes:
            pieces = changed
    head: dict[str, Any] = {"dtype": coding.dtype, "shape": coding.shape}
    head |= {"crc32": zlib.crc32(new.data), "pieces": {}}
    changed_bytes = sum(p.nbytes for p in pieces.values())
    deflate = "whole" not in pieces and (  # their compression gains little
        coding.compress == "always"
        or (coding.compress == "auto" and changed_bytes <= new.nbytes // _WORTH_IT)
    )
    stored = []
    for name, piece in pieces.items():
        body = _deflated(piece) if deflate else None
        head["pieces"][name] = [piece.nbytes, None if body is None else len(body)]
        stored.append(piece.tobytes() if body is None else body)
    line = json.dumps(head).encode()
    return b"".join((len(line).to_bytes(4, "little"), line, *stored))


def decode(block: Bytes, base: Bytes | None, target: Bytes) -> None:
    """Decode a tensor.

    Args:
        block: The result of :func:`encode`.
        base: ``[n]``; the bytes that the reader has; can be ``target`` itself.
        target: ``[n]``; receives the new tensor.

    Raises:
        ChecksumMismatch: If the result is not the original tensor.
    """
    try:
        head, pieces = _pieces(block)
        wanted = int(head["crc32"])
        if "whole" in pieces:
            target[:] = pieces["whole"]
        elif base is None:
            raise ChecksumMismatch("it contains changes only")
        else:
            if target is not base:
                target[:] = base
            _change(target.view(_kind(target.nbytes, head["shape"])), pieces)
    except ChecksumMismatch:
        raise
    except (ValueError, KeyError, IndexError, TypeError, zlib.error) as e:
        raise ChecksumMismatch(f"it is not readable ({type(e).__name__}: {e})") from e
    if zlib.crc32(target.data) != wanted:
        raise ChecksumMismatch("it does not match its checksum")


def coding_of(block: Bytes) -> Coding:
    """Return the coding with which a tensor was encoded.

    Raises:
        ChecksumMismatch: If the data is not readable.
    """
    try:
        head = _head(block)[0]
        return Coding(str(head["dtype"]), [int(n) for n in head["shape"]])
    except (ValueError, KeyError, TypeError) as e:
        raise ChecksumMismatch(f"it is not readable ({type(e).__name__}: {e})") from e


def _kind(num_bytes: int, shape: list[int]) -> type[np.signedinteger[Any]]:
    count = prod(shape)
    return _WIDTHS[num_bytes // count if count else 1]


def _changes(new: Ints, old: Ints) -> dict[str, Bytes]:
    changed = new != old
    if int(np.count_nonzero(changed)) > len(new) // 8:
        positions = {"bits": np.packbits(changed)}
        steps = (new - old)[changed]  # wraps around, as the addition does
    else:
        where = np.flatnonzero(changed)
        positions = {"gaps": _gap_bytes(np.diff(where, prepend=-1) - 1)}
        steps = new[where] - old[where]
    narrow = steps.astype(np.int8)
    wide = (narrow != steps) | (narrow == _WIDE)
    if new.itemsize == 1 or 2 * int(np.count_nonzero(wide)) > len(steps):
        return positions | {"wide": steps.view(np.uint8)}
    narrow[wide] = _WIDE
    return positions | {"narrow": narrow.view(np.uint8), "wide": steps[wide].view(np.uint8)}


def _change(values: Ints, pieces: dict[str, Bytes]) -> None:
    where: npt.NDArray[Any]
    if "gaps" in pieces:
        where = _gap_positions(pieces["gaps"])
    else:
        where = np.unpackbits(pieces["bits"], count=len(values)).view(np.bool_)
    wide = pieces["wide"].view(values.dtype)
    if "narrow" in pieces:
        narrow = pieces["narrow"].view(np.int8)
        steps = narrow.astype(values.dtype)
        steps[narrow == _WIDE] = wide
    else:
        steps = wide
    values[where] += steps


def _gap_bytes(gaps: npt.NDArray[np.int64]) -> Bytes:
    """Encode each gap as the quotient by 255 in bytes of 255, then the remainder."""
    more = gaps // _GO_ON
    if not more.any():
        return gaps.astype(np.uint8)
    out = np.full(len(gaps) + int(more.sum()), _GO_ON, np.uint8)
    out[np.cumsum(more + 1) - 1] = gaps % _GO_ON
    return out


def _gap_positions(gaps: Bytes) -> npt.NDArray[np.int64]:
    ends = gaps != _GO_ON
    positions: npt.NDArray[np.int64] = np.cumsum(gaps.astype(np.int64) + ends)[ends] - 1
    return positions


def _deflated(piece: Bytes) -> bytes | None:
    """Return the compressed piece if it is small enough; a sample decides whether to try."""
    if piece.nbytes > 2 * _SAMPLE_BYTES:
        middle = piece[piece.nbytes // 2 :][:_SAMPLE_BYTES]
        if len(zlib.compress(middle.data, 1)) > _PAYS * _SAMPLE_BYTES:
            return None
    body = zlib.compress(piece.data, 1)
    return body if len(body) <= _PAYS * piece.nbytes else None


def _pieces(block: Bytes) -> tuple[dict[str, Any], dict[str, Bytes]]:
    head, start = _head(block)
    pieces: dict[str, Bytes] = {}
    for name, (plain, deflated) in head["pieces"].items():
        size = plain if deflated is None else deflated
        body = block[start : start + size]
        if len(body) != size:
            raise ValueError("it is truncated")
        if deflated is not None:
            body = np.frombuffer(zlib.decompress(body.data), np.uint8)
        pieces[name] = body
        start += size
    return head, pieces


def _head(block: Bytes) -> tuple[dict[str, Any], int]:
    """Return the header and the offset of its end."""
    length = int.from_bytes(block[:4].tobytes(), "little")
    head: dict[str, Any] = json.loads(block[4 : 4 + length].tobytes())
    return head, 4 + length


HEAD = "#delta"
Named = Iterator[tuple[str, torch.Tensor]]


class DeltaChannel(WeightChannel):
    """A channel for changed elements only, with checksums, over another channel.

    Args:
        location: Location of the underlying channel.
        over: Id of the underlying channel, or a mapping of id and options.
        keep: Number of newest versions that can be fetched.
        full_every: Interval, in versions, at which the full weights are published.
        compress: ``auto`` compresses tensors that become at least a tenth smaller, if few elements
            have changed; ``always`` also if many have; ``never`` compresses nothing.
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
        # All versions since the last full one must be available for the oldest version.
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
        """The versions that ``_base`` contains; empty: ``_base`` is not usable."""

    def publish(self, policy_version: int, tensors: Tensors) -> Publication:
        """Publish the changes; see :class:`WeightChannel`."""
        began = time.perf_counter()
        chain = [*self._chain, policy_version]
        if len(chain) > self._full_every or chain != sorted(set(chain)):
            chain = [policy_version]
        is_full, self._chain = len(chain) == 1, []  # empty until it has succeeded
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
        """Close the underlying channel and release the base."""
        self._beneath.close()
        self._base, self._chain = {}, []

    def _written(self, chain: list[int], tensors: Tensors) -> Named:
        """Yield the encoded tensors, and keep a copy of each for the next version."""
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
        """Yield a version, from the base if it is a match, else from the last full version."""
        mine, self._chain = self._chain, []  # empty until all is received
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
        """Update the base to a version, tensor by tensor; a full version needs no base."""
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
    """A version of the underlying channel, after its header was read."""

    chain: list[int]
    """The versions from the last full one to this one. A single one is full."""
    entries: Named
    is_fresh: bool = True

    def blocks(self) -> Named:
        """Return the tensors after the header; can be used once."""
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
    """Yield the versions to apply, in order: the missing ones, then all since the full one."""
    if mine and len(mine) < len(chain) and chain[: len(mine)] == mine:
        yield chain[len(mine) :]
    yield chain


def _like(known: torch.Tensor | None, coding: Coding) -> torch.Tensor:
    dtype = dtype_of(coding.dtype)
    if known is not None and (known.dtype, list(known.shape)) == (dtype, coding.shape):
        return known
    return torch.empty(coding.shape, dtype=dtype)


def _array(tensor: torch.Tensor) -> Bytes:
    """Return the raw bytes ``[n]``, without a copy."""
    array: Bytes = raw(tensor).numpy()
    return array
