"""Weights by broadcast: the trainer's end and the engines form a process group of their own.

    location: a folder both ends can read (the trainer's end writes its address there),
              or tcp://TOKEN@HOST:PORT where they share none

    publish:  copy to host memory, bucket by bucket     the trainer goes on as soon as that is done
    fetch:    ask; join the group of those who ask at the same time; receive bucket by bucket
              the group breaks: the rest comes over this end's own connection

Takes: tensors, one by one. Gives: the same, in views of the buckets they came in. Never:
waits without a limit, or needs all engines to be there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_plugins.weights.broker import Block, Hub, HubOptions
from rollart_plugins.weights.config import BUCKET_BYTES
from rollart_plugins.weights.group import BroadcastGroup, Membership, open_store
from rollart_plugins.weights.tensors import Tensors, buckets, pack, view
from rollart_plugins.weights.wire import Message, receive, receive_block, send

ADDRESS_FILE = "collective.json"
_LOOK_EVERY_S = 0.1
Named = Iterator[tuple[str, torch.Tensor]]


class CollectiveChannel(WeightChannel):
    """Broadcast from the trainer to all engines that ask at the same time.

    Args:
        location: A folder, or ``tcp://TOKEN@HOST:PORT``.
        keep: How many of the newest versions can be fetched; all are held in the trainer's memory.
        bucket_bytes: About how much is copied and sent at once.
        backend: ``gloo`` or ``nccl``.
        host: The trainer's address as engines see it, where ``location`` is a folder.
        timeout_s: The longest wait for any one answer of another end.
        gather_s: How long a broadcast waits for engines that have not asked yet.

    Raises:
        ValueError: When ``location`` is no such address, or an option is out of range.
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

    # The trainer's end

    def publish(self, policy_version: int, tensors: Tensors) -> Publication:
        """Copy the tensors to memory from where engines are served meanwhile."""
        began = time.perf_counter()
        blocks = [Block(*pack(b)) for b in buckets(tensors, self._bucket_bytes)]
        if self._hub is None:
            self._hub = self._open_hub()
        self._hub.hold(policy_version, blocks, self._keep)
        num_bytes = sum(view(b.memory, r).nbytes for b in blocks for r in b.rows)
        self.moved_bytes += num_bytes
        return Publication(policy_version, num_bytes, time.perf_counter() - began)

    def versions(self) -> list[int]:
        """Return the policy versions that can be fetched, oldest first; of the trainer's end."""
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
            raise ValueError(f"weights cannot be offered at {where}: {e}") from e
        if self._address is None:
            folder = Path(self._location)
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{ADDRESS_FILE}.{os.getpid()}.part"
            part.touch(mode=0o600)
            part.write_text(json.dumps({**there, "port": hub.port}), encoding="utf-8")
            part.replace(folder / ADDRESS_FILE)
        return hub

    # An engine's end

    def fetch(self, policy_version: int) -> Named:
        """Return the tensors of a version; see :class:`WeightChannel`."""
        answer = self._ask({"ask": "group", "version": policy_version})
        self._check_held(answer, policy_version)
        return self._tensors(policy_version, answer)

    def newest(self) -> int | None:
        """Return the version published last; None when nobody publishes."""
        try:
            answer = self._ask({"ask": "newest"}, wait=False)
        except LookupError:
            return None
        newest: int | None = answer.get("newest")
        return newest

    def close(self) -> None:
        """Free connections, groups and, at the trainer's end, what is held; may be called twice."""
        self._closed = True
        hub, self._hub = self._hub, None
        self._hang_up()
        if hub is None:
            return
        hub.close()
        if self._address is None:
            folder = Path(self._location)
            (folder / ADDRESS_FILE).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another's files
                folder.rmdir()

    def _tensors(self, policy_version: int, answer: Message) -> Named:
        """Yield what the group brings; when it breaks, the rest over the own connection."""
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
            if not whole:  # what is still under way belongs to nobody
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
        """Yield what follows the first ``done`` blocks, of the same edition and no other."""
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
                    break  # the trainer is gone; asking waits for it, and for the same edition
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
                f"no weights of policy version {policy_version} at {self._location}; the trainer "
                f"holds {answer['held']}"
            )

    # The connection

    def _ask(self, message: Message, *, wait: bool = True) -> Message:
        """Ask the trainer's end; one that has died may be on its way back, and is waited for.

        Raises:
            LookupError: When there is none.
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
                    continue  # it broke since the last time
                if not wait or time.monotonic() - began > self._timeout_s:
                    raise LookupError(f"nobody publishes at {self._location}: {e}") from e
            time.sleep(_LOOK_EVERY_S)

    def _connected(self) -> socket.socket:
        if self._closed:
            raise LookupError(f"this end of the weight channel at {self._location} is closed")
        if self._connection is None:
            there = self._there()
            with self._patience():
                # An answer may come behind another engine's broadcast that runs into its limit.
                connection = socket.create_connection(
                    (there["host"], there["port"]), timeout=2 * self._timeout_s
                )
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connection = connection
                send(connection, {"token": there["token"]})
                answer = receive(connection)
            if "error" in answer:
                self._hang_up()
                raise ValueError(f"{self._location}: the trainer refuses: {answer['error']}")
        return self._connection

    def _there(self) -> Message:
        if self._address is not None:
            return self._address
        file = Path(self._location) / ADDRESS_FILE
        try:
            there: Message = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise LookupError(
                f"nobody publishes at {self._location}: there is no {ADDRESS_FILE} there"
            ) from None
        return there

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Say who did not answer."""
        try:
            yield
        except TimeoutError:
            self._hang_up()
            raise TimeoutError(
                f"the trainer's end of the weight channel at {self._location} did not answer "
                f"within {2 * self._timeout_s:g} s (twice weights.timeout_s)"
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
        raise ValueError(f"{location!r} is no address; tcp://TOKEN@HOST:PORT is one")
    return {"host": parts.hostname, "port": port, "token": parts.username}
