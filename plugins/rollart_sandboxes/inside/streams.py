"""Streams of the sandbox: connections in it, and programs that the host exchanges data with.

Takes: sockets. Gives: frames with a stream's number (``s``), in both directions. Never: holds more
than one window of bytes for a slow reader, or more connections than :data:`MOST`.
"""

from __future__ import annotations

import collections
import os
import resource
import selectors

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Deque, Dict, Tuple

CHUNK = 1 << 18
WINDOW = 1 << 20
MOST = 256
SHUT_WR = 1


class Tunnel:
    """One stream: the data to write, and the credit to read."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.waiting: Deque[bytes] = collections.deque()
        self.credit = WINDOW
        self.read_ended = self.write_ended = self.shut = False


class Streams:
    """All streams of the agent; used only by the thread of its loop."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.tunnels: Dict[int, Tunnel] = {}
        self.listeners: Dict[socket.socket, Tuple[str, int]] = {}
        self.num_tunnels = 0

    def forward(self, path: str, said: str, number: int) -> None:
        """Listen on a unix socket; its connections are streams of the host's ``forward`` number."""
        import socket

        os.makedirs(os.path.dirname(path), exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
        except OSError as e:
            listener.close()
            raise OSError(e.errno, e.strerror, said) from None
        self.listeners[listener] = (path, os.lstat(path).st_ino)
        self.listen(listener, number)

    def proxy(self, port: int, forward: int) -> int:
        """Listen on a port of the sandbox's loopback, a free one if 0; return its number."""
        import socket

        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        self.listen(listener, forward)
        return int(listener.getsockname()[1])

    def listen(self, listener: socket.socket, number: int) -> None:
        listener.listen(64)
        listener.setblocking(False)
        self.agent.watch(listener, selectors.EVENT_READ, lambda _: self.accept(listener, number))

    def accept(self, listener: socket.socket, forward: int) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        # Commands need descriptors too: connections use at most a quarter of them.
        if len(self.tunnels) >= min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
            connection.close()
            return
        connection.setblocking(False)
        self.num_tunnels += 1
        tunnel = self.add(self.num_tunnels, connection)
        self.agent.send({"op": "open", "s": tunnel.number, "forward": forward})
        self.tend(tunnel)

    def add(self, number: int, connection: socket.socket) -> Tunnel:
        tunnel = self.tunnels[number] = Tunnel(number, connection)
        return tunnel

    def after_restore(self) -> None:
        """End the streams of programs that are gone, and close sockets that no longer exist."""
        for tunnel in list(self.tunnels.values()):
            if tunnel.number > 0:
                self.agent.send({"op": "reset", "s": tunnel.number})
                self.shut(tunnel)
        for listener, (path, inode) in list(self.listeners.items()):
            try:
                there = os.lstat(path).st_ino == inode
            except OSError:
                there = False
            if not there:
                del self.listeners[listener]
                self.agent.watch(listener, 0, self.agent.flush)
                listener.close()

    def last_words(self, tunnel: Tunnel) -> None:
        """Send the remaining output of a program that has ended, within a window."""
        for _ in range(16):
            if not tunnel.shut and not tunnel.read_ended and tunnel.credit > 0:
                self.on_tunnel(tunnel, selectors.EVENT_READ)
        if not tunnel.shut:
            self.shut(tunnel)

    def tend(self, tunnel: Tunnel) -> None:
        """Watch for the events that a tunnel can handle now; close it if both directions ended."""
        if tunnel.shut:
            return
        if tunnel.read_ended and tunnel.write_ended and not tunnel.waiting:
            self.shut(tunnel)
            return
        mask = 0
        if not tunnel.read_ended and tunnel.credit > 0:
            mask |= selectors.EVENT_READ
        if tunnel.waiting:
            mask |= selectors.EVENT_WRITE
        self.agent.watch(tunnel.connection, mask, lambda m: self.on_tunnel(tunnel, m))

    def on_tunnel(self, tunnel: Tunnel, mask: int) -> None:
        if tunnel.shut:
            return
        try:
            if mask & selectors.EVENT_READ:
                data = tunnel.connection.recv(min(CHUNK, tunnel.credit))
                tunnel.read_ended = not data
                tunnel.credit -= len(data)
                self.agent.send({"op": "data" if data else "eof", "s": tunnel.number}, data)
            if mask & selectors.EVENT_WRITE:
                self.pour(tunnel)
        except BlockingIOError:
            pass
        except OSError:
            self.agent.send({"op": "reset", "s": tunnel.number})
            self.shut(tunnel)
        self.tend(tunnel)

    def pour(self, tunnel: Tunnel) -> None:
        sent = tunnel.connection.send(tunnel.waiting[0])
        rest = tunnel.waiting.popleft()[sent:]
        if rest:
            tunnel.waiting.appendleft(rest)
        if tunnel.number > 0:  # a program's peer does not need acknowledgements
            self.agent.send({"op": "ack", "s": tunnel.number, "n": sent})
        if not tunnel.waiting and tunnel.write_ended:
            tunnel.connection.shutdown(SHUT_WR)

    def take(self, header: Dict[str, Any], body: bytes) -> None:
        """Process a frame of the host for a tunnel: data, eof, ack or reset."""
        tunnel = self.tunnels.get(header["s"])
        if tunnel is None:
            return
        what = header["what"]
        if what == "data":
            tunnel.waiting.append(body)
            if len(tunnel.waiting) == 1:
                self.on_tunnel(tunnel, selectors.EVENT_WRITE)
                return
        elif what == "ack":
            tunnel.credit += header["n"]
        elif what == "eof":
            tunnel.write_ended = True
            if not tunnel.waiting:
                try:
                    tunnel.connection.shutdown(SHUT_WR)
                except OSError:
                    self.shut(tunnel)
        else:
            self.shut(tunnel)
        self.tend(tunnel)

    def shut(self, tunnel: Tunnel) -> None:
        tunnel.shut = True
        self.agent.watch(tunnel.connection, 0, self.agent.flush)
        tunnel.connection.close()
        self.tunnels.pop(tunnel.number, None)


def socketpair() -> Tuple["socket.socket", "socket.socket"]:
    """Return both ends of a program's stream; the first is the agent's."""
    import socket

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs
