"""The trainer's side of the collective channel: it stores the newest versions and serves them.

    engines request a version ----> gathered for a moment ----> one group, one broadcast
       |                                                            | a member dies or is too slow:
       +--- requests the remaining blocks <-------------------------+ the group is aborted
            and receives them over its own connection

Takes: versions, as blocks of bytes on the host. Gives: the requested versions, from its own
threads.
Never: makes the trainer wait for an engine, or an engine wait for a dead one longer than a timeout.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rollart_plugins.weights.in_server.rollart_group import BroadcastGroup, Membership, open_store
from rollart_plugins.weights.tensors import Row
from rollart_plugins.weights.wire import Message, receive, send, send_block


@dataclass(frozen=True, slots=True)
class Block:
    """One bucket of a version."""

    rows: list[Row]
    memory: torch.Tensor
    """``[n]`` bytes on the host."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """One publication of a version. Each publication has its own name."""

    blocks: list[Block]
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def index(self, start: int = 0) -> Message:
        """Return the description for an engine, starting at block ``start``."""
        blocks = self.blocks[start:]
        return {
            "edition": self.name,
            "blocks": [block.rows for block in blocks],
            "sizes": [block.memory.nbytes for block in blocks],
        }


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Options of the server."""

    host: str
    port: int
    token: str
    backend: str
    timeout_s: float
    gather_s: float


@dataclass(slots=True, eq=False)
class _Subscriber:
    """The connection of one engine."""

    name: str
    connection: socket.socket
    host: str


@dataclass(slots=True, eq=False)
class _Gathering:
    """Engines that requested the same version and receive it together."""

    policy_version: int
    subscribers: list[tuple[_Subscriber, int]] = field(default_factory=list)
    """Each with its number of ranks: one, or the processes of its inference server."""
    complete: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class Hub:
    """Server of versions; see the module."""

    def __init__(self, options: HubOptions) -> None:
        self._options = options
        self._versions: dict[int, WeightVersion] = {}
        self._last: int | None = None
        self._lock = threading.Lock()
        self._broadcasting = threading.Lock()
        self._subscribers: dict[str, _Subscriber] = {}
        self._gathering: _Gathering | None = None
        self._group: tuple[tuple[tuple[str, int], ...], BroadcastGroup] | None = None
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._listener = socket.create_server((options.host, options.port))
        self.port: int = self._listener.getsockname()[1]
        self._store, self._store_port = open_store(options.host, None, options.timeout_s)
        self._start(self._accept)

    def hold(self, policy_version: int, blocks: list[Block], keep: int) -> None:
        """Add a version; of those not above it, the newest ``keep`` are kept."""
        with self._lock:
            self._versions[policy_version] = WeightVersion(blocks)
            self._last = policy_version
            newest = sorted(v for v in self._versions if v <= policy_version)[-keep:]
            self._versions = {v: self._versions[v] for v in newest}

    def versions(self) -> list[int]:
        """Return the stored versions."""
        with self._lock:
            return sorted(self._versions)

    def close(self) -> None:
        """End all threads and connections; may be called twice."""
        self._closed = True
        _hang_up(self._listener)
        with self._lock:
            subscribers = list(self._subscribers.values())
        for subscriber in subscribers:
            _hang_up(subscriber.connection)
        self._give_up_group()
        for thread in list(self._threads):
            thread.join(self._options.timeout_s)
        self._versions = {}

    # Connections

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True, name="rollart-weights")
        self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._welcome, connection, str(address[0]))

    def _welcome(self, connection: socket.socket, host: str) -> None:
        subscriber = _Subscriber(secrets.token_hex(8), connection, host)
        try:
            connection.settimeout(self._options.timeout_s)
            hello = receive(connection)
            if not hmac.compare_digest(str(hello.get("token")), self._options.token):
                return send(connection, {"error": "the token is wrong"})
            send(connection, {"ok": True})
            connection.settimeout(None)  # an engine can send requests at any time
            with self._lock:
                self._subscribers[subscriber.name] = subscriber
            while not self._closed:
                self._answer(subscriber, receive(connection))
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._subscribers.pop(subscriber.name, None)
                self._end_gathering()
            _hang_up(connection)
            self._threads.discard(threading.current_thread())

    def _answer(self, subscriber: _Subscriber, asked: Message) -> None:
        if asked.get("ask") == "newest":
            with self._lock:
                newest = self._last
            return send(subscriber.connection, {"newest": newest})
        version = int(asked["version"])
        with self._lock:
            version_data, held = self._versions.get(version), sorted(self._versions)
        if version_data is None or asked.get("edition") not in (None, version_data.name):
            return send(subscriber.connection, {"held": held})
        subscriber.connection.settimeout(self._options.timeout_s)
        try:
            if asked.get("ask") == "group":
                self._together(subscriber, version, int(asked.get("ranks", 1)))
            else:
                self._alone(subscriber, version_data, int(asked.get("from", 0)))
        finally:
            with contextlib.suppress(OSError):
                subscriber.connection.settimeout(None)

    def _alone(self, subscriber: _Subscriber, version_data: WeightVersion, start: int) -> None:
        send(subscriber.connection, version_data.index(start))
        for block in version_data.blocks[start:]:
            send_block(subscriber.connection, block.memory)

    # Broadcasts

    def _together(self, subscriber: _Subscriber, version: int, num_ranks: int) -> None:
        """Join the concurrent requests for this version; the first of them serves all."""
        with self._lock:
            gathering = self._gathering
            is_first = gathering is None or gathering.policy_version != version
            if gathering is None or is_first:
                gathering = self._gathering = _Gathering(version)
            gathering.subscribers.append((subscriber, num_ranks))
            self._end_gathering()
        if not is_first:
            gathering.done.wait()
            return
        gathering.complete.wait(self._options.gather_s)
        try:
            with self._broadcasting:
                self._broadcast(gathering)
        finally:
            gathering.done.set()

    def _end_gathering(self) -> None:
        """Stop waiting when all connected engines have sent a request; requires the lock."""
        if self._gathering is not None:
            asked = {subscriber.name for subscriber, _ in self._gathering.subscribers}
            if asked >= self._subscribers.keys():
                self._gathering.complete.set()

    def _broadcast(self, gathering: _Gathering) -> None:
        with self._lock:
            if self._gathering is gathering:
                self._gathering = None
            subscribers = sorted(gathering.subscribers, key=lambda g: g[0].name)
            version_data = self._versions.get(gathering.policy_version)
        if version_data is None:  # removed in the meantime
            for subscriber, _ in subscribers:
                _notify(subscriber, {"held": self.versions()})
            return
        members = tuple((subscriber.name, num_ranks) for subscriber, num_ranks in subscribers)
        if self._group is not None and self._group[0] != members:
            self._give_up_group()
        name = self._group[1].member.name if self._group else secrets.token_hex(8)
        size = 1 + sum(num_ranks for _, num_ranks in members)
        rank = 1
        for subscriber, num_ranks in subscribers:
            place = {"name": name, "rank": rank, "size": size}
            _notify(subscriber, {"group": place, "store": self._store_port} | version_data.index())
            rank += num_ranks
        try:
            group = (
                self._group[1] if self._group else self._join(Membership(name, 0, size), members)
            )
            for block in version_data.blocks:
                group.broadcast(block.memory.to(group.device))
        except RuntimeError:  # a member ended or is too slow: the others request the rest alone
            self._give_up_group()

    def _join(self, place: Membership, members: tuple[tuple[str, int], ...]) -> BroadcastGroup:
        options = self._options
        group = BroadcastGroup(self._store, place, options.backend, options.host, options.timeout_s)
        self._group = (members, group)
        return group

    def _give_up_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group[1].abandon()


def _notify(subscriber: _Subscriber, message: Message) -> None:
    """Send a message; the broadcast detects a closed connection."""
    with contextlib.suppress(OSError):
        send(subscriber.connection, message)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
