"""Length-prefixed pickles over an asyncio stream: how a part talks to the run that owns it.

Takes: a stream pair. Gives: ``send`` and ``receive`` of Python objects. Never: crosses a trust
boundary; both ends are processes of one run, joined by a private socket pair.
"""

from __future__ import annotations

import asyncio
import copyreg
import pickle
import struct
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.rollout.env_answers import Observed
from rollart_core.types import TokenSpan

_HEADER = struct.Struct("<Q")
STREAM_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """Ask the part to run a method (or, with a colon in the name, a function of a module)."""

    call_id: int
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gave: a value, or the exception it raised."""

    call_id: int
    value: Any = None
    error: BaseException | None = None


def _as_arguments(record: type[Any]) -> None:
    """Pickle a record as a call of its class.

    A frozen record with slots has a ``__getstate__`` in Python that looks its fields up each time:
    this halves the cost of a message.
    """
    values = attrgetter(*(f.name for f in fields(record)))
    copyreg.pickle(record, lambda sent: (record, values(sent)))


for _record in (Call, Answer, GenerateRequest, GenerateResult, TokenSpan, Observed):
    _as_arguments(_record)


def encode(message: Call | Answer) -> bytes:
    """Return the frame of a message."""
    body = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Call | Answer:
    """Wait for the next message.

    Raises:
        asyncio.IncompleteReadError: When the other end is gone.
    """
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    message: Call | Answer = pickle.loads(await reader.readexactly(size))
    return message
