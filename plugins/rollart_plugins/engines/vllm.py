"""The ``vllm`` engine: a running vLLM server, with token ids, that follows training.

    load_weights: fetch, write safetensors -> [no request in flight] -> reload, clear cache -> on

    watch:        an idle connection, which closes when the server ends

Takes: requests; versions of weights. Gives: the samples of the server; each answer is of exactly
one policy version.
Never: has a request in flight while weights change, or continues with a server that was restarted.
A restarted server has other weights, so all calls raise EngineDied, and the engine is built again
with the newest weights.

The engine uses these endpoints of vLLM: ``/collective_rpc`` with the worker's ``reload_weights``,
and ``/reset_prefix_cache``. vLLM only provides them with ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from rollart_core.contracts.inference import GenerateRequest, GenerateResult, WeightSwap
from rollart_core.contracts.weights import WeightChannel
from rollart_core.errors import ConfigError, EndpointError, EngineDied, InferenceFailure
from rollart_plugins.engines.config import OpenAIConfig, VllmConfig
from rollart_plugins.engines.endpoint import EndpointServer
from rollart_plugins.engines.openai import OpenAIEngine, server_of

if TYPE_CHECKING:
    import torch

    from rollart_plugins.engines.incoming import Incoming

_AGAIN_S = 0.5


class VllmEngine(OpenAIEngine):
    """Engine that uses a vLLM server and reloads its weights; see the module.

    Args:
        model_path: Path of the served model's tokenizer.
        channel: Channel of new weights. None: the server keeps its weights.
        deterministic: Rejected.
        max_context_tokens: Maximum length of prompt and answer together, at most the server's.
        engine_index: Index of the engine in the run; only engine 0 can follow training.
        options: The fields of :class:`VllmConfig`, and options for other engines.

    Raises:
        ConfigError: If the server does not support what the run requires.
    """

    follows_training: ClassVar[bool] = True

    def __init__(
        self,
        *,
        model_path: str,
        channel: WeightChannel | None = None,
        deterministic: bool = False,
        max_context_tokens: int = 2048,
        engine_index: int = 0,
        **options: object,
    ) -> None:
        if engine_index and channel is not None:
            channel.close()
            raise ConfigError(
                "runtime.num_engines: a vLLM server supports one engine only, because no request "
                "can be in flight during a weight update; set it to 1"
            )
        own = {name: value for name, value in options.items() if name in VllmConfig.model_fields}
        self._vllm = VllmConfig.model_validate(own)
        shared = self._vllm.model_dump(include=set(OpenAIConfig.model_fields))
        super().__init__(
            OpenAIConfig.model_validate(shared),
            model_path=model_path,
            channel=channel,
            deterministic=deterministic,
            max_context_tokens=max_context_tokens,
        )
        self._channel = channel
        self._fetching = Lock()
        self._folder: Path | None = None
        self._architectures: tuple[str, ...] | None = None
        self._dead = ""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the server, compare its tokens with the tokenizer's, and watch the connection.

        Raises:
            ConfigError: If the server is not reachable, or has another model.
        """
        self._swap_lock, self._free, self._idle = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._free.set()
        await self._await_server()
        await super().start()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See :meth:`InferenceEngine.generate`.

        Raises:
            EngineDied: If the server has ended or was restarted.
        """
        self._check_alive()
        raw = self._channel is not None and self._vllm.logprobs == "raw"
        if raw and request.temperature not in (0.0, 1.0):
            failure = InferenceFailure(
                f"rollout.temperature is {request.temperature:g}, but raw logprobs are those of "
                "temperature 1: start vLLM with --logprobs-mode processed_logprobs and set "
                "engine.logprobs: processed",
                boundary="generate",
            )
            failure.retryable = False
            raise failure
        return await super().generate(request)

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """See :meth:`InferenceEngine.load_weights`.

        Raises:
            LookupError: If the channel has neither this version nor a newer one.
            EngineDied: If the server rejects the weights (its state is then unknown), or they
                cannot be written.
        """
        self._ready()
        channel = self._channel
        if channel is None:
            raise InferenceFailure("the engine has no weight channel", boundary="load_weights")
        async with self._swap_lock:
            moved = -channel.moved_bytes
            try:
                incoming, folder = await asyncio.to_thread(self._written, channel, policy_version)
            except InferenceFailure as e:
                self._dead = str(e)
                raise EngineDied(self._dead, boundary="load_weights") from e
            self._free.clear()
            try:
                await self._quiet()
                began = time.perf_counter()
                await self._reload(folder)
                self._version = incoming.policy_version
            finally:
                self._free.set()
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return WeightSwap(
                incoming.policy_version,
                time.perf_counter() - began,
                incoming.num_bytes,
                fetch_s=incoming.fetch_s,
                moved_bytes=moved + channel.moved_bytes,
            )

    async def close(self) -> None:
        """Disconnect all requests, and remove the written files."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await super().close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if self._channel is not None:
            self._channel.close()

    # Weights

    def _written(self, channel: WeightChannel, policy_version: int) -> tuple[Incoming, Path]:
        """Fetch and write in a thread, one at a time; a cancelled caller's thread continues."""
        from rollart_plugins.engines.hub_names import as_in_files, model_config
        from rollart_plugins.engines.incoming import fetch
        from rollart_plugins.engines.weight_files import write_model, written

        with self._fetching:
            if self._architectures is None:
                given = model_config(self._model_path).get("architectures")
                self._architectures = tuple(given or ())
            with written(Path(self._vllm.weights_dir or tempfile.gettempdir())):
                folder = self._new_folder()
            named = partial(as_in_files, architectures=self._architectures)

            def stage(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
                return write_model(folder, named(tensors))

            try:
                return fetch(channel, policy_version, stage), folder
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def _new_folder(self) -> Path:
        from rollart_plugins.engines.weight_files import new_folder

        if self._folder is None:
            self._folder = new_folder("vllm", self._vllm.weights_dir)
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        folder.chmod(0o755)
        return folder

    async def _quiet(self) -> None:
        """Wait until no request is in flight."""
        while self._num_running:
            self._idle.clear()
            await self._idle.wait()
        self._check_alive()

    async def _reload(self, folder: Path) -> None:
        """Load the weights in a folder into the server.

        Raises:
            EngineDied: If the server rejects them.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self._client.post("/collective_rpc", body)
            await self._client.post("/reset_prefix_cache", {})
        except EndpointError as e:
            hint = " (start it with VLLM_SERVER_DEV_MODE=1)" if e.kind == "missing" else ""
            self._dead = f"vLLM rejected new weights: {e}{hint}"
            raise EngineDied(self._dead, boundary="load_weights") from e

    async def _post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        assert self._open is not None
        while not (self._free.is_set() and self._open.is_set()):
            await self._free.wait()
            await self._open.wait()
        self._check_alive()
        try:
            return await super()._post(path, body)
        finally:
            if not self._num_running:
                self._idle.set()

    # The server

    async def _await_server(self) -> None:
        """Connect, and watch the connection: while it is open, the server was not restarted."""
        parts = urlsplit(self._vllm.base_url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        until_s = time.monotonic() + self._vllm.start_s
        while True:
            try:
                reader, writer = await asyncio.open_connection(
                    parts.hostname, port, ssl=parts.scheme == "https" or None
                )
                break
            except OSError as e:
                if time.monotonic() >= until_s:
                    raise ConfigError(
                        f"engine: no server is reachable at {self._vllm.base_url} "
                        f"({e.strerror or e}): start the server, or correct engine.base_url"
                    ) from e
            await asyncio.sleep(_AGAIN_S)
        self._watching = asyncio.create_task(self._watch(reader, writer), name="vllm watch")

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                await reader.read(1)
            self._dead = (
                f"vLLM at {self._vllm.base_url} closed its connection: it ended or was restarted "
                "(do not use a proxy that closes idle connections)"
            )
        finally:
            writer.close()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDied(self._dead, boundary="generate")

    def _failure(self, error: EndpointError) -> InferenceFailure:
        if error.kind == "unreachable":
            self._dead = self._dead or str(error)
            return EngineDied(self._dead, boundary="generate")
        return super()._failure(error)

    def _server(self) -> EndpointServer:
        return replace(server_of(self._vllm), retry_lost=False)
