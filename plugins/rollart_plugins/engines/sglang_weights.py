"""The transports of new weights to an SGLang server.

    tensors     base64 of pickled tensors, in the requests themselves
    folders     a model folder that the server loads like its initial weights
    broadcast   from the trainer (rank 0) to the processes of all servers

Takes: full tensors that fit the model. Gives: a server that has all of them under one tag.
Never: pauses the server (the engine does), or waits without a limit.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from rollart_core.contracts.weights import Broadcast
from rollart_core.errors import ConfigError, InferenceFailure
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.config import SGLangConfig
from rollart_plugins.engines.server_answers import Json
from rollart_plugins.engines.server_client import ServerClient
from rollart_plugins.engines.weight_files import (
    Named,
    folder_beside,
    link_model,
    new_folder,
    write_model,
    written,
)
from rollart_plugins.engines.weight_transport import WeightTransport
from rollart_plugins.weights.tensors import buckets


class FolderTransport(WeightTransport):
    """A model folder for each version: config and tokenizer copied, weights linked or written."""

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


@contextlib.asynccontextmanager
async def _update(client: ServerClient) -> AsyncIterator[None]:
    """Begin a weight update on the server, and end it after all buckets are sent."""
    await client.post(dialect.BEGIN_UPDATE, {})
    yield
    await client.post(dialect.END_UPDATE, {}, limit_s=None)


def _last_words(is_last: bool, tag: str, keep_kv: bool) -> Json:
    """Return the fields that differ for the last bucket, after which the new weights are active."""
    return {
        "weight_version": tag if is_last else None,
        "flush_cache": is_last and not keep_kv,
        "abort_all_requests": False,
    }


def _encoded(body: Json) -> bytes:
    return json.dumps(body).encode()


class TensorTransport:
    """Pickled tensors in the requests of an update."""

    def __init__(self, client: ServerClient, tp_size: int, bucket_bytes: int) -> None:
        self._client, self._tp_size, self._bucket_bytes = client, tp_size, bucket_bytes

    def prepare(self, tensors: Iterable[Named]) -> list[str]:
        """Pickle clones of the tensors; a pickled view would contain its whole storage."""
        return [
            base64.b64encode(pickle.dumps([(name, t.clone()) for name, t in bucket])).decode()
            for bucket in buckets(tensors, self._bucket_bytes)
        ]

    async def send(self, ready: list[str], tag: str, *, keep_kv: bool) -> None:
        """Send the buckets; the last one has the tag."""
        for i, bucket in enumerate(ready):
            body = {
                "serialized_named_tensors": [bucket] * self._tp_size,
                **_last_words(i == len(ready) - 1, tag, keep_kv),
            }
            encoded = await asyncio.to_thread(_encoded, body)
            await self._client.post(dialect.UPDATE_FROM_TENSOR, encoded, limit_s=None)


class SGLangTransport(WeightTransport):
    """The transport that needs the fewest copies.

    broadcast, the channel can broadcast: the server's processes receive from the trainer
    files, the channel consists of files that the server can read: it loads them through links
    folder, ``weights_folder`` is set: a folder for each version is written there
    tensors, otherwise: in the requests
    """

    def __init__(
        self, config: SGLangConfig, client: ServerClient, model_path: str, tp_size: int
    ) -> None:
        self.num_ranks = tp_size
        self._tensors = TensorTransport(client, tp_size, config.bucket_bytes)
        self._client, self._config, self._model_path = client, config, model_path
        self._folders: FolderTransport | None = None
        self._group = ""

    def prepare(self, tensors: Iterable[Named], files: Sequence[Path] | None = None) -> Any:
        """See :meth:`WeightTransport.prepare`."""
        if not (files or self._config.weights_folder):
            return self._tensors.prepare(tensors)
        if self._folders is None:
            folder, bucket_bytes = self._config.weights_folder, self._config.bucket_bytes
            model = model_folder(self._model_path)
            self._folders = FolderTransport(self._client, model, folder, bucket_bytes)
        return self._folders.prepare(tensors, files)

    async def send(self, ready: Any, tag: str, *, keep_kv: bool) -> None:
        """See :meth:`WeightTransport.send`."""
        if isinstance(ready, Broadcast):
            await self._receive(ready, tag, keep_kv=keep_kv)
        elif isinstance(ready, Path):
            assert self._folders is not None
            await self._folders.send(ready, tag, keep_kv=keep_kv)
        else:
            async with _update(self._client):
                await self._tensors.send(ready, tag, keep_kv=keep_kv)

    async def _receive(self, broadcast: Broadcast, tag: str, *, keep_kv: bool) -> None:
        """Let the server receive a broadcast; if it fails, send the rest in requests."""
        done = 0
        async with _update(self._client):
            try:
                await self._join(broadcast)
                for i, bucket in enumerate(broadcast.buckets):
                    names, dtypes, shapes = zip(*bucket, strict=True)
                    body = {
                        "names": names,
                        "dtypes": dtypes,
                        "shapes": shapes,
                        "group_name": self._group,
                        "load_format": "flattened_bucket",
                        **_last_words(i == len(broadcast.buckets) - 1, tag, keep_kv),
                    }
                    await self._client.post(dialect.UPDATE_FROM_DISTRIBUTED, body, limit_s=None)
                    done += 1
            except InferenceFailure:
                if done < len(broadcast.buckets):
                    await self._send_rest(broadcast, done, tag, keep_kv=keep_kv)

    async def _send_rest(self, broadcast: Broadcast, done: int, tag: str, *, keep_kv: bool) -> None:
        await self.leave()
        try:
            ready = await asyncio.to_thread(self._tensors.prepare, broadcast.rest(done))
        except (LookupError, TimeoutError) as e:
            raise InferenceFailure(
                f"the broadcast failed, and the rest cannot be fetched: {e}",
                boundary="load_weights",
            ) from e
        await self._tensors.send(ready, tag, keep_kv=keep_kv)

    async def _join(self, broadcast: Broadcast) -> None:
        """Join the group of a broadcast, unless the server is in it."""
        if self._group == broadcast.group:
            return
        await self.leave()
        self._group = broadcast.group
        body = {
            "master_address": broadcast.host,
            "master_port": broadcast.port,
            "rank_offset": broadcast.first_rank,
            "world_size": broadcast.num_ranks,
            "group_name": broadcast.group,
            "backend": broadcast.backend,
        }
        await self._client.post(dialect.JOIN_GROUP, body, limit_s=None)

    async def leave(self) -> None:
        """Remove the server from the group."""
        group, self._group = self._group, ""
        if group:
            with contextlib.suppress(InferenceFailure, TimeoutError):
                await self._client.post(dialect.LEAVE_GROUP, {"group_name": group})

    def close(self) -> None:
        """Remove the folders."""
        if self._folders is not None:
            self._folders.close()


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
        "weights in files require the config of the model on this machine, but "
        f"{model_path} is neither a folder nor in the hub's cache. Download it, or set "
        "model.path to its folder"
    )
