"""The messages of the collective channel besides the process group: JSON and blocks of bytes.

Takes: a connected socket. Gives: small messages, and blocks of raw bytes after them.
Never: unpickles received data, or waits longer than the socket's timeout.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import torch

_LONGEST = 1 << 28
Message = dict[str, Any]


def send(connection: socket.socket, message: Message) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(4, "little") + body)


def receive(connection: socket.socket) -> Message:
    """Receive one message.

    Raises:
        ConnectionError: If the connection is closed, or the data has another format.
        TimeoutError: If the message does not arrive in time.
    """
    size = int.from_bytes(_exactly(connection, bytearray(4)), "little")
    if size > _LONGEST:
        raise ConnectionError("the peer is not a weight channel")
    try:
        message = json.loads(_exactly(connection, bytearray(size)))
    except ValueError as e:
        raise ConnectionError("the peer is not a weight channel") from e
    if not isinstance(message, dict):
        raise ConnectionError("the peer is not a weight channel")
    return message


def send_block(connection: socket.socket, block: torch.Tensor) -> None:
    """Send raw bytes ``[n]``; the receiver already has their number."""
    connection.sendall(block.numpy().data)


def receive_block(connection: socket.socket, num_bytes: int) -> torch.Tensor:
    """Receive raw bytes ``[num_bytes]``."""
    block = torch.empty(num_bytes, dtype=torch.uint8)
    _exactly(connection, block.numpy().data)
    return block


def _exactly(connection: socket.socket, into: Any) -> Any:
    view = memoryview(into)
    while view.nbytes:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the connection")
        view = view[got:]
    return into
