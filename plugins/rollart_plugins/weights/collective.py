"""Weights by broadcast: the trainer and the engines form a separate process group.

    location: a folder that both sides can read (the trainer writes its address there),
              or tcp://TOKEN@HOST:PORT without a shared folder

    publish:  copy to host memory, bucket by bucket; the trainer continues when this is done
    fetch:    request; join the group of the concurrent requests; receive bucket by bucket
              if the group fails, the rest is sent over the engine's own connection

The processes of an inference server can be members instead of the engine's process, which then
receives nothing (:meth:`CollectiveChannel.broadcast`).

Takes: tensors, one by one. Gives: the same tensors, as views of the received buckets.
Never: waits without a limit, or requires all engines to be present.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rollart_core.contracts.weights import Broadcast, Publication, WeightChannel
from rollart_plugins.weights.broker import Block, Hub, HubOptions
from rollart_plugins.weights.config import BUCKET_BYTES
from rollart_plugins.weights.in_server.rollart_group import BroadcastGroup, Membership, open_store
from rollart_plugins.weights.tensors import Tensors, blocks, view
from rollart_plugins.weights.wire import Message, receive, receive_block, send

ADDRESS_FILE = "collective.json"
_LOOK_EVERY_S = 0.1
Named = Iterator[tuple[str, torch.Tensor]]


class CollectiveChannel(WeightChannel):
    """Broadcast from the trainer to all engines that request weights at the same time.

    Args:
        location: A folder, or ``tcp://TOKEN@HOST:PORT``.
        keep: Number of newest versions that can be fetched. All are in the trainer's memory.
        bucket_bytes: Approximate number of bytes that are copied and sent in one operation.
        backend: ``gloo`` or ``nccl``.
        host: Address of the trainer from the engines' point of view, if ``location`` is a folder.
        timeout_s: Maximum time for one answer of another rank.
        gather_s: How long a broadcast waits for engines that have not requested the version yet.

    Raises:
        ValueError: If ``location`` is not such an address, or an option is out of range.
    """

    def __init__(
        self,
        location: str,
        keep: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        gather_s: float = 0.2,
    ) -> None:
        if keep < 1 or bucket_bytes < 1:
            raise ValueError(f"keep ({keep}) and bucket_bytes ({bucket_bytes}) must be at least 1")
        self._location, self._keep, self._bucket_bytes = location, keep, bucket_bytes
        self._address = _address(location) if "://" in location else None
        self._backend, self._host = backend, host
        self._timeout_s, self._gather_s = timeout_s, gather_s
        self._hub: Hub | None = None
        self._connection: socket.socket | None = None
        self._store: Any = None
        self._closed = False
        self._group: BroadcastGroup | None = None

    # Trainer

    def publish(self, policy_version: int, tensors: Tensors) -> Publication:
        """Copy the tensors to memory from which engines are served in the background."""
        began = time.perf_counter()
        held = [Block(rows, memory) for rows, memory in blocks(tensors, self._bucket_bytes)]
        if self._hub is None:
            self._hub = self._open_hub()
        self._hub.hold(policy_version, held, self._keep)
        num_bytes = sum(block.memory.nbytes for block in held)
        self.moved_bytes += num_bytes
        return Publication(policy_version, num_bytes, time.perf_counter() - began)

    def versions(self) -> list[int]:
        """Return the policy versions that can be fetched, oldest first; only for the trainer."""
        return self._hub.versions() if self._hub else []

    def _open_hub(self) -> Hub:
        there = self._address or {"host": self._host, "port": 0, "token": secrets.token_hex(16)}
        try:
            hub = Hub(
                HubOptions(
                    there["host"],
                    there["port"],
                    there["token"],
                    self._backend,
                    self._timeout_s,
                    self._gather_s,
                )
            )
        except OSError as e:
            where = f"{there['host']}:{there['port']}"
            raise ValueError(f"the weight channel cannot listen on {where}: {e}") from e
        if self._address is None:
            folder = Path(self._location)
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{ADDRESS_FILE}.{os.getpid()}.part"
            part.touch(mode=0o600)
            part.write_text(json.dumps({**there, "port": hub.port}), encoding="utf-8")
            part.replace(folder / ADDRESS_FILE)
        return hub

    # Engine

    def fetch(self, policy_version: int) -> Named:
        """Return the tensors of a version; see :class:`WeightChannel`."""
        answer = self._ask({"ask": "group", "version": policy_version})
        self._check_held(answer, policy_version)
        return self._tensors(policy_version, answer)

    def broadcast(self, policy_version: int, num_ranks: int) -> Broadcast:
        """See :meth:`WeightChannel.broadcast`."""
        self._leave_group()
        answer = self._ask({"ask": "group", "version": policy_version, "ranks": num_ranks})
        self._check_held(answer, policy_version)
        place = Membership(**answer["group"])
        return Broadcast(
            policy_version=policy_version,
            group=place.name,
            host=self._there()["host"],
            port=answer["store"],
            backend=self._backend,
            first_rank=place.rank,
            num_ranks=place.size,
            buckets=[[(n, d, tuple(s)) for n, d, s, _ in rows] for rows in answer["blocks"]],
            rest=partial(self._alone, policy_version, answer),
        )

    def newest(self) -> int | None:
        """Return the version published last; None without a publisher."""
        try:
            answer = self._ask({"ask": "newest"}, wait=False)
        except LookupError:
            return None
        newest: int | None = answer.get("newest")
        return newest

    def close(self) -> None:
        """Close connections and groups, and release the trainer's versions; can be called twice."""
        self._closed = True
        hub, self._hub = self._hub, None
        self._hang_up()
        if hub is None:
            return
        hub.close()
        if self._address is None:
            folder = Path(self._location)
            (folder / ADDRESS_FILE).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it contains files of others
                folder.rmdir()

    def _tensors(self, policy_version: int, answer: Message) -> Named:
        """Yield tensors from the group; if it fails, the rest over the engine's own connection."""
        done = 0
        whole = False
        try:
            try:
                for block in self._from_group(answer):
                    rows = answer["blocks"][done]
                    done += 1
                    yield from self._views(rows, block)
            except (RuntimeError, OSError):
                self._leave_group()
                if done < len(answer["blocks"]):
                    yield from self._alone(policy_version, answer, done)
            whole = True
        finally:
            if not whole:  # discard data that is still in transit
                self._hang_up()

    def _from_group(self, answer: Message) -> Iterator[torch.Tensor]:
        place = Membership(**answer["group"])
        group = self._group
        if group is None or group.member != place:
            self._leave_group()
            group = self._group = self._join(place, answer["store"])
        for size in answer["sizes"]:
            block = torch.empty(size, dtype=torch.uint8, device=group.device)
            group.broadcast(block)
            yield block

    def _join(self, place: Membership, store_port: int) -> BroadcastGroup:
        assert self._connection is not None
        if self._store is None:
            self._store = open_store(self._there()["host"], store_port, self._timeout_s)[0]
        mine = self._connection.getsockname()[0]
        return BroadcastGroup(self._store, place, self._backend, mine, self._timeout_s)

    def _alone(self, policy_version: int, begun: Message, done: int) -> Named:
        """Yield the blocks after the first ``done`` ones, of the same edition only."""
        while done < len(begun["blocks"]):
            asked = {"ask": "alone", "version": policy_version, "edition": begun["edition"]}
            answer = self._ask(asked | {"from": done})
            self._check_held(answer, policy_version)
            for size in answer["sizes"]:
                assert self._connection is not None
                try:
                    with self._patience():
                        block = receive_block(self._connection, size)
                except ConnectionError:
                    break  # the trainer ended; the request waits for a new one with this edition
                yield from self._views(begun["blocks"][done], block)
                done += 1

    def _views(self, rows: list[Any], block: torch.Tensor) -> Named:
        for row in rows:
            tensor = view(block, row)
            self.moved_bytes += tensor.nbytes
            yield row[0], tensor

    def _check_held(self, answer: Message, policy_version: int) -> None:
        if "held" in answer:
            raise LookupError(
                f"no weights of policy version {policy_version} at {self._location}; available: "
                f"{answer['held']}"
            )

    # Connection

    def _ask(self, message: Message, *, wait: bool = True) -> Message:
        """Send a request to the trainer; wait if it has ended, because it can restart.

        Raises:
            LookupError: If there is no publisher.
        """
        began = time.monotonic()
        while True:
            was_connected = self._connection is not None
            try:
                connection = self._connected()
                with self._patience():
                    send(connection, message)
                    return receive(connection)
            except TimeoutError:
                raise
            except OSError as e:
                self._hang_up()
                if was_connected:
                    continue  # the connection was lost since the last request
                if not wait or time.monotonic() - began > self._timeout_s:
                    raise LookupError(f"no trainer publishes at {self._location}: {e}") from e
            time.sleep(_LOOK_EVERY_S)

    def _connected(self) -> socket.socket:
        if self._closed:
            raise LookupError(f"the weight channel at {self._location} is closed on this side")
        if self._connection is None:
            there = self._there()
            with self._patience():
                # An answer can be delayed by another engine's broadcast until its timeout.
                connection = socket.create_connection(
                    (there["host"], there["port"]), timeout=2 * self._timeout_s
                )
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connection = connection
                send(connection, {"token": there["token"]})
                answer = receive(connection)
            if "error" in answer:
                self._hang_up()
                raise ValueError(
                    f"{self._location}: the trainer rejected the connection: {answer['error']}"
                )
        return self._connection

    def _there(self) -> Message:
        if self._address is not None:
            return self._address
        file = Path(self._location) / ADDRESS_FILE
        try:
            there: Message = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise LookupError(
                f"no trainer publishes at {self._location}: the folder has no {ADDRESS_FILE}"
            ) from None
        return there

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Raise a TimeoutError with the address if the trainer does not answer."""
        try:
            yield
        except TimeoutError:
            self._hang_up()
            raise TimeoutError(
                f"the trainer at {self._location} did not answer within {2 * self._timeout_s:g} "
                "s (twice weights.timeout_s)"
            ) from None

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abandon()

    def _hang_up(self) -> None:
        self._leave_group()
        self._store = None
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _address(location: str) -> Message:
    parts = urlsplit(location)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not (parts.hostname and port and parts.username):
        raise ValueError(f"{location!r} is not a valid address; use tcp://TOKEN@HOST:PORT")
    return {"host": parts.hostname, "port": port, "token": parts.username}
