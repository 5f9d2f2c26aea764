"""The transports of new weights from the engine's process to its SGLang server.

    tensor        base64 of pickled tensors, in the requests themselves
    disk          a model folder that the server loads like its initial weights
    distributed   a broadcast from this process (rank 0) to the server's (ranks 1 .. tp_size)

Takes: full tensors that fit the model. Gives: a server that has all of them under one tag.
Never: pauses the server (the engine does), or waits without a limit.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from rollart_core.errors import ConfigError, InferenceFailure
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.config import SGLangConfig
from rollart_plugins.engines.server_answers import Json
from rollart_plugins.engines.server_checks import ServerFacts
from rollart_plugins.engines.server_client import ServerClient
from rollart_plugins.engines.server_engine import WeightTransport
from rollart_plugins.engines.server_process import free_port
from rollart_plugins.engines.weight_files import (
    Named,
    folder_beside,
    link_model,
    new_folder,
    write_model,
    written,
)

dist: Any = torch.distributed  # its exports are not typed


class DiskTransport(WeightTransport):
    """A model folder for each version: config and tokenizer copied, weights written."""

    def __init__(
        self, client: ServerClient, model: Path, folder: str | None, bucket_bytes: int
    ) -> None:
        self._client, self._model, self._bucket_bytes = client, model, bucket_bytes
        self._home = new_folder("sglang", folder)
        self._num_written = 0
        self._in_use: Path | None = None

    def prepare(self, tensors: Iterable[Named], files: Sequence[Path] | None = None) -> Path:
        """Write or link the folder; see :meth:`WeightTransport.prepare`."""
        self._num_written += 1
        folder = folder_beside(files) if files else self._home / str(self._num_written)
        try:
            with written(folder):
                folder.mkdir(exist_ok=True)
                for file in self._model.glob("*.json"):
                    if not file.name.endswith(".index.json"):
                        shutil.copy(file, folder / file.name)
            if files:
                link_model(folder, files, tensors)
            else:
                write_model(folder, tensors, self._bucket_bytes)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    async def send(self, ready: Path, tag: str, *, keep_kv: bool) -> None:
        """See :meth:`WeightTransport.send`."""
        body = {
            "model_path": str(ready),
            "weight_version": tag,
            "flush_cache": not keep_kv,
            "abort_all_requests": False,
        }
        await self._client.post(dialect.UPDATE_FROM_DISK, body, limit_s=None)
        before, self._in_use = self._in_use, ready
        if before is not None:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    def close(self) -> None:
        """Remove the folders."""
        shutil.rmtree(self._home, ignore_errors=True)
        if self._in_use is not None:
            shutil.rmtree(self._in_use, ignore_errors=True)


class _Session:
    """Common code of both tensor transports: an update consists of buckets."""

    def __init__(self, client: ServerClient, bucket_bytes: int) -> None:
        self.client, self._bucket_bytes = client, bucket_bytes

    def buckets(self, tensors: Iterable[Named]) -> Iterator[list[Named]]:
        """Yield the tensors in lists of about the size of a bucket; at least one list."""
        bucket: list[Named] = []
        size = 0
        for name, tensor in tensors:
            if bucket and size + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        yield bucket

    @contextlib.asynccontextmanager
    async def update(self) -> Any:
        """Begin a weight update on the server, and end it after all buckets are sent."""
        await self.client.post(dialect.BEGIN_UPDATE, {})
        yield
        await self.client.post(dialect.END_UPDATE, {}, limit_s=None)


def _last_words(is_last: bool, tag: str, keep_kv: bool) -> Json:
    """Return the fields that differ for the last bucket, after which the new weights are active."""
    return {
        "weight_version": tag if is_last else None,
        "flush_cache": is_last and not keep_kv,
        "abort_all_requests": False,
    }


class TensorTransport(WeightTransport):
    """Pickled tensors in the request."""

    def __init__(self, client: ServerClient, tp_size: int, bucket_bytes: int) -> None:
        self._session, self._tp_size = _Session(client, bucket_bytes), tp_size

    def prepare(self, tensors: Iterable[Named], files: Sequence[Path] | None = None) -> list[str]:
        """Pickle clones of the tensors; a pickled view would contain its whole storage."""
        return [
            base64.b64encode(
                pickle.dumps([(name, t.detach().cpu().clone()) for name, t in bucket])
            ).decode()
            for bucket in self._session.buckets(tensors)
        ]

    async def send(self, ready: list[str], tag: str, *, keep_kv: bool) -> None:
        """See :meth:`WeightTransport.send`."""
        async with self._session.update():
            for i, bucket in enumerate(ready):
                body = {
                    "serialized_named_tensors": [bucket] * self._tp_size,
                    **_last_words(i == len(ready) - 1, tag, keep_kv),
                }
                await self._session.client.post(dialect.UPDATE_FROM_TENSOR, body, limit_s=None)


class DistributedTransport(WeightTransport):
    """A broadcast; the process group exists as long as the server."""

    def __init__(
        self, client: ServerClient, config: SGLangConfig, backend: str, tp_size: int
    ) -> None:
        self._session = _Session(client, config.bucket_bytes)
        self._backend, self._host, self._tp_size = backend, config.host, tp_size
        self._limit = timedelta(seconds=config.update_s)
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._group: Any = None
        self._name = ""

    def prepare(
        self, tensors: Iterable[Named], files: Sequence[Path] | None = None
    ) -> list[list[Named]]:
        """Move the tensors to the device of the broadcast."""
        moved = ((name, t.detach().to(self._device).contiguous()) for name, t in tensors)
        return list(self._session.buckets(moved))

    async def send(self, ready: list[list[Named]], tag: str, *, keep_kv: bool) -> None:
        """See :meth:`WeightTransport.send`; if a server rejects them, no broadcast is received."""
        if self._group is None:
            await self._join()
        async with self._session.update():
            for i, bucket in enumerate(ready):
                body = {
                    "names": [name for name, _ in bucket],
                    "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
                    "shapes": [list(t.shape) for _, t in bucket],
                    "group_name": self._name,
                    **_last_words(i == len(ready) - 1, tag, keep_kv),
                }
                await self._both(
                    self._session.client.post(dialect.UPDATE_FROM_DISTRIBUTED, body, limit_s=None),
                    asyncio.to_thread(self._broadcast, bucket),
                )

    async def _join(self) -> None:
        port = free_port()
        # a running server can have groups of earlier engines, so the name must be unique
        self._name = f"rollart-{os.getpid()}-{port}"
        body = {
            "master_address": self._host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self._tp_size,
            "group_name": self._name,
            "backend": self._backend,
        }
        await self._both(
            self._session.client.post(dialect.JOIN_GROUP, body, limit_s=None),
            asyncio.to_thread(self._make_group, port),
        )

    async def _both(self, asked: Any, done_here: Any) -> None:
        """Wait for the server's response and the local work; if one fails, cancel the other."""
        ours = asyncio.ensure_future(done_here)
        theirs = asyncio.ensure_future(asked)
        try:
            await asyncio.gather(theirs, ours)
        except BaseException:
            theirs.cancel()
            self.close()  # releases the thread that waits in the broadcast
            await asyncio.gather(ours, theirs, return_exceptions=True)
            raise

    def _make_group(self, port: int) -> None:
        """Join as rank 0, in the way SGLang does: a group in addition to the default one."""
        from torch.distributed import distributed_c10d

        c10d: Any = distributed_c10d  # torch has no public API for a group besides the default one

        store = dist.TCPStore(
            self._host,
            port,
            1 + self._tp_size,
            is_master=True,
            wait_for_workers=False,
            timeout=self._limit,
        )
        group, _ = c10d._new_process_group_helper(
            1 + self._tp_size,
            0,
            [],
            c10d.Backend(self._backend),
            c10d.PrefixStore(self._name, store),
            group_name=self._name,
            timeout=self._limit,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(1 + self._tp_size)}
        self._group = group

    def _broadcast(self, bucket: Sequence[Named]) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("the process group was aborted")
        work = [dist.broadcast(t, src=0, group=group, async_op=True) for _, t in bucket]
        for one in work:
            one.wait(self._limit)

    async def leave(self) -> None:
        """Remove the server from the group."""
        if self._group is not None:
            with contextlib.suppress(InferenceFailure, TimeoutError):
                await self._session.client.post(dialect.LEAVE_GROUP, {"group_name": self._name})

    def close(self) -> None:
        """Abort the group, even during a broadcast."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, AttributeError, ValueError):
                group.abort()


def new_transport(
    config: SGLangConfig, client: ServerClient, server: ServerFacts, model_path: str
) -> WeightTransport:
    """Return the transport that the config selects."""
    if config.weight_transport == "disk":
        folder = model_folder(model_path)
        return DiskTransport(client, folder, config.weights_folder, config.bucket_bytes)
    if config.weight_transport == "tensor":
        return TensorTransport(client, server.tp_size, config.bucket_bytes)
    return DistributedTransport(client, config, _backend(config, server), server.tp_size)


def _backend(config: SGLangConfig, server: ServerFacts) -> str:
    """Return the backend of the broadcast; NCCL does not support two ranks on one GPU.

    If the server is on this machine, this process and the server's first process can share a GPU.
    """
    if config.backend != "auto":
        return config.backend
    is_elsewhere = bool(config.url) and not _is_loopback(config.host)
    can = server.device == "cuda" and torch.cuda.is_available()
    return "nccl" if is_elsewhere and can else "gloo"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def model_folder(model_path: str) -> Path:
    """Return the folder of a model's config: its folder, or the folder in the hub's cache.

    Raises:
        ConfigError: If it is not on this machine.
    """
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        found = try_to_load_from_cache(model_path, "config.json")
        if isinstance(found, str):
            return Path(found).parent
    raise ConfigError(
        "engine.weight_transport: disk requires the config of the model on this machine, but "
        f"{model_path} is neither a folder nor in the hub's cache. Download it, or set "
        "model.path to its folder"
    )
