"""How one tensor is written as what has changed in it since the version before, bit for bit.

    new - old, as integers of the tensor's width (mod 2^width)     most are 0, most others +-1
      positions of what is not 0:  gaps of a byte each (255: go on), or one bit an element
      their differences:           a byte each (-128: the difference stands among the wide ones)
        deflated, where they are few and that makes them a tenth less
    or the whole tensor, where that is not more

Takes: the raw bytes of both. Gives: bytes that say what they are, with a CRC-32 of the result.
Never: rounds; what is read back is the new tensor, or an error.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

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
"""Deflated bytes are kept when they are at most this share."""
_SAMPLE_BYTES = 1 << 16
_WORTH_IT = 16
"""``auto`` deflates changes of at most this part of the tensor: of more, it costs more seconds than
a network that carries weights at all would take for them."""


class ChecksumMismatch(ValueError):
    """The result is not the tensor that was written: another base, or damage."""


@dataclass(frozen=True, slots=True)
class Coding:
    """What is written, and how."""

    dtype: str
    shape: list[int]
    compress: Compress = "auto"


def encode(new: Bytes, old: Bytes | None, coding: Coding) -> bytes:
    """Write ``new``.

    Args:
        new: ``[n]``; the raw bytes of the tensor.
        old: ``[n]``; what the reader has. None: it has nothing.
        coding: How.
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
    deflate = "whole" not in pieces and (  # which gets little smaller for much time
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
    """Read a tensor.

    Args:
        block: What :func:`encode` gave.
        base: ``[n]``; what the reader has; may be ``target`` itself.
        target: ``[n]``; becomes the new tensor.

    Raises:
        ChecksumMismatch: When it does not come out as it was written.
    """
    try:
        head, pieces = _pieces(block)
        wanted = int(head["crc32"])
        if "whole" in pieces:
            target[:] = pieces["whole"]
        elif base is None:
            raise ChecksumMismatch("it holds changes only")
        else:
            if target is not base:
                target[:] = base
            _change(target.view(_kind(target.nbytes, head["shape"])), pieces)
    except ChecksumMismatch:
        raise
    except (ValueError, KeyError, IndexError, TypeError, zlib.error) as e:
        raise ChecksumMismatch(f"it cannot be read ({type(e).__name__}: {e})") from e
    if zlib.crc32(target.data) != wanted:
        raise ChecksumMismatch("it does not have its checksum")


def coding_of(block: Bytes) -> Coding:
    """Return what :func:`encode` was told of a tensor.

    Raises:
        ChecksumMismatch: When it cannot be read.
    """
    try:
        head = _head(block)[0]
        return Coding(str(head["dtype"]), [int(n) for n in head["shape"]])
    except (ValueError, KeyError, TypeError) as e:
        raise ChecksumMismatch(f"it cannot be read ({type(e).__name__}: {e})") from e


def _kind(num_bytes: int, shape: list[int]) -> type[np.signedinteger[Any]]:
    count = prod(shape)
    return _WIDTHS[num_bytes // count if count else 1]


def _changes(new: Ints, old: Ints) -> dict[str, Bytes]:
    changed = new != old
    if int(np.count_nonzero(changed)) > len(new) // 8:
        positions = {"bits": np.packbits(changed)}
        steps = (new - old)[changed]  # wraps round, as adding it again does
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
    """Write each gap as as many 255 as it holds, and the rest."""
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
    """Return it deflated, if that pays; a sample decides whether to try."""
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
            raise ValueError("it is cut off")
        if deflated is not None:
            body = np.frombuffer(zlib.decompress(body.data), np.uint8)
        pieces[name] = body
        start += size
    return head, pieces


def _head(block: Bytes) -> tuple[dict[str, Any], int]:
    """Return the head and where it ends."""
    length = int.from_bytes(block[:4].tobytes(), "little")
    head: dict[str, Any] = json.loads(block[4 : 4 + length].tobytes())
    return head, 4 + length
