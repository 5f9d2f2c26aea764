"""Length-prefixed pickles over an asyncio stream, between a worker's process and its owner.

Takes: Python objects, or bytes. Gives: bytes of a stream, or Python objects. Never: crosses a trust
boundary. Both ends are processes of one run, connected by a private socket pair.
"""

from __future__ import annotations

import asyncio
import copyreg
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, cast

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.rollout.env_answers import Observed
from rollart_core.types import TokenSpan

_HEADER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Call:
    """A request to call a method, or with a colon in the name a function of a module."""

    call_id: int
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call: a value, or the exception it raised."""

    call_id: int
    value: Any = None
    error: BaseException | None = None


def _as_arguments(record: type[Any]) -> None:
    """Pickle a record as a call of its class.

    A frozen dataclass with slots has a ``__getstate__`` in Python that looks up its fields each
    time. This function halves the cost of a message.
    """
    values = attrgetter(*(f.name for f in fields(record)))
    copyreg.pickle(record, lambda sent: (record, values(sent)))


for _record in (Call, Answer, GenerateRequest, GenerateResult, TokenSpan, Observed):
    _as_arguments(_record)


def encode(message: Call | Answer) -> bytes:
    """Return the frame of a message."""
    body = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(body)) + body


class FrameProtocol(asyncio.Protocol):
    """One end of a stream of messages.

    Args:
        take: Called with each message, on the loop.
        ended: Called once, when the other end has closed or the stream is broken.
    """

    transport: asyncio.Transport

    def __init__(self, take: Callable[[Call | Answer], None], ended: Callable[[], None]) -> None:
        self._take, self._ended = take, ended
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, which messages are written to."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Decode the complete messages."""
        self._data += data
        begin, size = 0, _HEADER.size
        while len(self._data) - begin >= size:
            end = begin + size + _HEADER.unpack_from(self._data, begin)[0]
            if len(self._data) < end:
                break
            self._take(pickle.loads(bytes(self._data[begin + size : end])))
            begin = end
        del self._data[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        """Call ``ended``."""
        self._ended()
