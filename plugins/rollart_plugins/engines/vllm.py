"""The vLLM engine: a server process that it launches, or a server that is already running.

    generate       /inference/v1/generate: token ids in; token ids, logprobs and weight versions out
    load_weights   /pause?mode=keep -> receive a broadcast, or reload_weights from files
                   -> name the weights -> /resume

Takes: the calls of a :class:`ServerEngine`. Gives: requests of vLLM's protocol.
Never: drains requests for new weights, or uses a server that cannot tell which weights sampled a
token, or whose logprobs are not those of the sampled distribution.

Tested with vLLM 0.32. The endpoints for weights require ``VLLM_SERVER_DEV_MODE=1``, the token
endpoint requires ``--enable-scale-out``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rollart_core.contracts.inference import FinishReason, GenerateRequest
from rollart_core.contracts.weights import Broadcast
from rollart_core.errors import ConfigError, InferenceFailure
from rollart_core.models.hub_names import model_config
from rollart_plugins.engines.config import EngineServerConfig, VllmConfig
from rollart_plugins.engines.server_adapters import NUM_ADAPTERS
from rollart_plugins.engines.server_answers import Answer, Json, odd_answer
from rollart_plugins.engines.server_checks import ServerFacts, tokenizer_trouble
from rollart_plugins.engines.server_client import ServerClient, ServerRefusal
from rollart_plugins.engines.server_engine import ServerEngine, SleepingPart
from rollart_plugins.engines.server_process import command_flags, free_port, launcher
from rollart_plugins.engines.weight_transport import WeightTransport
from rollart_plugins.weights import in_server

if TYPE_CHECKING:
    import torch

SERVER: Final = "vLLM"
GENERATE, ABORT = "/inference/v1/generate", "/abort_requests"
SLEEP, WAKE = "/sleep?level=2&mode=keep", "/wake_up?tags="
PAUSE, RESUME = "/pause?mode=keep&clear_cache=", "/resume"
RPC, NAME_WEIGHTS, WEIGHTS = "/collective_rpc", "/update_weight_version", "/weight_info"
VERSION, MODELS, METRICS, TOKENIZE = "/version", "/v1/models", "/metrics", "/tokenize"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SERVER_INFO = "/server_info?config_format=json"
POSTED = (ABORT, "/pause", RESUME, RPC, NAME_WEIGHTS)
"""Endpoints that a server must have. All of them only accept POST."""
ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the ids of requests to :data:`GENERATE`."""
TESTED = "vLLM 0.32 or newer"
RECEIVER: Final = "rollart_group.VllmReceiver"
"""The class for the processes of launched servers, in a file that is on their path."""
_NO_LOGPROB = -9999.0
"""Sent instead of a logprob that is not finite."""
_INFO_S = 300.0
"""Maximum time for ``/server_info``, which starts programs to describe the machine."""

_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
_ADAPTER_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""By default, all servers on a machine would bind their threads to the same cores."""
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that ``--max-lora-rank`` accepts."""


class VllmEngine(ServerEngine):
    """One vLLM server; see :class:`ServerEngine` for the arguments."""

    server: ClassVar[str] = SERVER
    answers_in_pause: ClassVar[bool] = True
    adapter_endpoints: ClassVar[tuple[str, str]] = (LOAD_ADAPTER, UNLOAD_ADAPTER)
    adapter_flags: ClassVar[str] = (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, --enable-lora, "
        "--max-lora-rank {rank} or more and --max-loras 4"
    )
    config_type: ClassVar[type[EngineServerConfig]] = VllmConfig
    _config: VllmConfig
    _is_on_cpu = False

    def _command_line(self, port: int, first_gpu: int | None) -> tuple[list[str], dict[str, str]]:
        config, self._is_on_cpu = self._config, first_gpu is None
        options: Json = {
            "dtype": self._dtype,
            "max_model_len": self._max_tokens,
            "tensor_parallel_size": config.tp_size,
            "seed": secrets.randbits(31),  # servers with one seed sample the same tokens
            "enforce_eager": self._is_on_cpu,
            "enable_sleep_mode": self._sleeps and not self._is_on_cpu,
            "enable_prompt_tokens_details": True,
            "disable_uvicorn_access_log": True,
            "worker_extension_cls": RECEIVER,
            **self._adapter_options(),
            **config.server_args,
            "enable_scale_out": True,
            "logprobs_mode": "processed_logprobs",
            "host": "127.0.0.1",
            "port": port,
        }
        argv = launcher(config.command, config.package, config.start_args)
        if first_gpu is None:
            devices = _CPU_ENVIRONMENT
        else:
            devices = {"CUDA_VISIBLE_DEVICES": _visible(first_gpu, config.tp_size)}
        adapters = {} if self._lora is None else _ADAPTER_ENVIRONMENT
        environment = {
            "PYTHONPATH": str(Path(in_server.__file__).parent),
            "VLLM_PORT": str(free_port()),  # of its ranks: the first of those that it tries
            **_ENVIRONMENT,
            **adapters,
            **devices,
            **config.environment,
        }
        return [*argv, self._model_path, *command_flags(options)], environment

    def _adapter_options(self) -> Json:
        """Return the flags for LoRA adapters.

        Raises:
            ConfigError: If vLLM has no such rank.
        """
        if self._lora is None:
            return {}
        ranks = [rank for rank in _ADAPTER_RANKS if rank >= self._lora.rank]
        if not ranks:
            raise ConfigError(
                f"lora.rank: vLLM loads adapters up to rank {_ADAPTER_RANKS[-1]}, not "
                f"{self._lora.rank}; use lora.sync: merged"
            )
        return {"enable_lora": True, "max_lora_rank": ranks[0], "max_loras": NUM_ADAPTERS}

    # Checks

    async def _check(self, client: ServerClient) -> ServerFacts:
        version = await _version(client)
        sleep = ("/sleep", "/wake_up") if self._sleeps else ()
        trouble = await _lacks(client, sleep) or await self._first_token(client)
        if trouble is None and self._process is None:
            trouble = await self._unsuitable(client)
        if trouble is not None:
            raise ConfigError(f"engine: the vLLM server at {client.url} ({version}) {trouble}")
        tag = self._first_tag()
        await client.post(NAME_WEIGHTS, {"new_version": tag})
        return ServerFacts(tag, device="cpu" if self._is_on_cpu else "cuda")

    async def _first_token(self, client: ServerClient) -> str | None:
        """Generate one token; return what is wrong with the answer."""
        request = GenerateRequest("rollart-check", [0], 1)
        try:
            said = await client.post(GENERATE, generate_body(request, "rollart-check", 1))
            read_answer(said)
        except ServerRefusal as e:
            fix = {
                401: "set engine.api_key_variable",
                403: "start it with --enable-scale-out",
                404: f"use {TESTED}",
            }.get(e.status)
            return f"does not generate from token ids: {e}" + (f"; {fix}" if fix else "")
        except InferenceFailure as e:
            return f"does not return what training needs: {e}; use {TESTED}"
        if self._keep_kv and _num_cached(said) is None:
            return (
                "does not tell which prompt tokens were cached: start it with "
                "--enable-prompt-tokens-details, or use rollout.kv_on_swap: recompute"
            )
        return None

    async def _unsuitable(self, client: ServerClient) -> str | None:
        """Return how a server that this engine did not launch does not fit the run."""
        about = (await client.get(SERVER_INFO, limit_s=_INFO_S))["vllm_config"]
        models = (await client.get(MODELS))["data"]
        model, parallel = about["model_config"], about["parallel_config"]
        self._is_on_cpu = about["device_config"]["device"] == "cpu"
        weights = (await client.get(WEIGHTS)).get("weight_version")
        if trouble := self._changed_base(str(weights)):
            return trouble
        mode = model.get("logprobs_mode")
        if mode != "processed_logprobs":
            return (
                f"returns {mode}, but training needs the logprobs of the sampled distribution: "
                "start it with --logprobs-mode processed_logprobs"
            )
        if self._sleeps and not self._is_on_cpu and not model.get("enable_sleep_mode"):
            return (
                "cannot free its GPU's memory, which runtime.colocate needs: start it with "
                "--enable-sleep-mode"
            )
        limit = int(models[0].get("max_model_len") or self._max_tokens)
        if limit < self._max_tokens:
            return (
                f"accepts at most {limit} tokens, but rollout.max_context_tokens is "
                f"{self._max_tokens}: start it with --max-model-len {self._max_tokens}, or lower "
                "rollout.max_context_tokens"
            )
        if int(parallel.get("data_parallel_size") or 1) != 1:
            return (
                "has several replicas (--data-parallel-size), which do not support weight updates; "
                "use more engines instead"
            )
        if len(self._config.url) > 1 and model.get("seed") == 0:
            return (
                "has the default seed 0, with which several servers sample the same tokens: start "
                "each server with its own --seed"
            )
        theirs = _architectures(str(models[0].get("root")))
        ours = self._facts.architectures
        if ours and theirs and theirs != ours:
            return f"has the model {theirs[0]}, but the run's model is {ours[0]}"
        path = None if model.get("skip_tokenizer_init") else TOKENIZE
        return await tokenizer_trouble(client, self._facts, str(model.get("tokenizer")), path)

    async def _is_alive(self, client: ServerClient) -> bool:
        """Ask the process that computes, because ``/health`` does not reach it."""
        expected = self._tag
        try:
            info = await client.get(WEIGHTS, limit_s=self._config.silent_s)
        except (InferenceFailure, TimeoutError):
            return False
        found = info.get("weight_version") if isinstance(info, Mapping) else None
        if found != expected and expected == self._tag and not self._swap_lock.locked():
            self._die(
                f"the vLLM server at {client.url} has the weights {found!r}, not those of this "
                "engine: it was restarted, or another run uses it"
            )
        return True

    # Requests

    async def _ask(
        self,
        client: ServerClient,
        request: GenerateRequest,
        rid: str,
        max_new_tokens: int,
        adapter: str,
    ) -> Answer:
        body = generate_body(request, rid, max_new_tokens)
        if adapter:
            body["model"] = adapter
        return read_answer(await client.post(GENERATE, body, limit_s=None))

    async def _ask_abort(self, client: ServerClient, rid: str) -> None:
        await client.post(ABORT, {"request_ids": [ID_PREFIX + rid]})

    async def _load(self, client: ServerClient) -> tuple[int, int, float]:
        return load_of(await client.get(METRICS))

    # Weights

    def _new_transport(self, client: ServerClient, seen: ServerFacts) -> WeightTransport:
        config = self._config
        is_ours = self._process is not None and "worker_extension_cls" not in config.server_args
        num_ranks = config.tp_size if is_ours else 0
        return _VllmTransport(client, config, num_ranks, with_head=seen.device == "cpu")

    async def _ask_pause(self, client: ServerClient, *, keep_kv: bool) -> None:
        await client.post(PAUSE + ("false" if keep_kv else "true"))

    async def _ask_continue(self, client: ServerClient) -> None:
        await client.post(RESUME)

    async def _ask_sleep(self, client: ServerClient) -> None:
        await client.post(SLEEP, limit_s=None)

    async def _ask_wake(self, client: ServerClient, part: SleepingPart) -> None:
        await client.post(WAKE + part, limit_s=None)

    async def _end_swap(self, client: ServerClient) -> None:
        await client.post(RESUME)


class _VllmTransport(WeightTransport):
    """The transport that needs the fewest copies.

    broadcast, the channel can broadcast: the server's processes receive from the trainer
    files, otherwise: the server reads a folder of safetensors files, which are links to those of
    the channel, or written by this process

    Args:
        client: Client of the server.
        config: Options of the engine.
        num_ranks: Processes of the server that can receive; 0 if they lack :data:`RECEIVER`.
        with_head: Whether the server gets a tied output head; see :func:`with_head`.
    """

    def __init__(
        self, client: ServerClient, config: VllmConfig, num_ranks: int, *, with_head: bool
    ) -> None:
        self.num_ranks = num_ranks
        self._client, self._config, self._with_head = client, config, with_head
        self._parent = config.weights_folder
        self._home: Path | None = None
        self._is_member = False

    def prepare(
        self, tensors: Iterable[tuple[str, torch.Tensor]], files: Sequence[Path] | None = None
    ) -> Path:
        """Write or link the folder; see :meth:`WeightTransport.prepare`."""
        from rollart_plugins.engines.weight_files import folder_beside, link_model
        from rollart_plugins.weights.in_server.rollart_group import with_head

        given = with_head(tensors) if self._with_head else tensors
        if not files:
            return self._written(given)
        folder = folder_beside(files)
        try:
            link_model(folder, files, given)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _written(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        from rollart_plugins.engines.weight_files import new_folder, write_model, written

        with written(Path(self._parent or tempfile.gettempdir())):
            if self._home is None:
                self._home = new_folder("vllm", self._parent)
            folder = Path(tempfile.mkdtemp(dir=self._home))
            folder.chmod(0o755)  # the server can run as another user
        try:
            write_model(folder, tensors)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    async def send(self, ready: Path | Broadcast, tag: str, *, keep_kv: bool) -> None:
        """See :meth:`WeightTransport.send`; the pause has cleared the cache if it must be."""
        if isinstance(ready, Broadcast):
            await self._receive(ready)
        else:
            await self._reload(ready)
        await self._client.post(NAME_WEIGHTS, {"new_version": tag})

    async def _reload(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self._client.post(RPC, body, limit_s=None)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _receive(self, broadcast: Broadcast) -> None:
        """Let the server receive a broadcast; if it fails, all tensors come in files."""
        place = {
            "host": broadcast.host,
            "port": broadcast.port,
            "group": broadcast.group,
            "backend": broadcast.backend,
            "first_rank": broadcast.first_rank,
            "num_ranks": broadcast.num_ranks,
            "timeout_s": self._config.update_s,
        }
        self._is_member = True
        try:
            given = [place, broadcast.buckets, self._with_head]
            await self._client.post(RPC, {"method": "rollart_receive", "args": given}, limit_s=None)
        except ServerRefusal:
            self._is_member = False
            try:
                ready = await asyncio.to_thread(self.prepare, broadcast.rest(0))
            except (LookupError, TimeoutError) as e:
                raise InferenceFailure(
                    f"the broadcast failed, and the weights cannot be fetched: {e}",
                    boundary="load_weights",
                ) from e
            await self._reload(ready)

    async def leave(self) -> None:
        """Remove the server from the group."""
        if self._is_member:
            self._is_member = False
            with contextlib.suppress(InferenceFailure, TimeoutError):
                await self._client.post(RPC, {"method": "rollart_leave"})

    def close(self) -> None:
        """Remove the folders."""
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)


def generate_body(request: GenerateRequest, rid: str, max_new_tokens: int) -> Json:
    """Return the body of one generation.

    It contains every sampling parameter, so that no default of the server or model applies.
    """
    return {
        "request_id": rid,
        "token_ids": list(map(int, request.token_ids)),
        "stream": False,
        "sampling_params": {
            "temperature": request.temperature,
            "max_tokens": max_new_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            "ignore_eos": True,  # only the stop tokens of the request end it
            "logprobs": 0,  # only the sampled token's
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
            "detokenize": False,
        },
    }


def read_answer(said: Any) -> Answer:
    """Return a response in the form that all servers share.

    Raises:
        InferenceFailure: If the response lacks required data.
    """
    try:
        (choice,) = said["choices"]
        token_ids = [int(i) for i in choice["token_ids"] or ()]
        rows = (choice.get("logprobs") or {}).get("content") or []
        reason = _reason(choice["finish_reason"])
        if [int(row["token_id"]) for row in rows] != token_ids:
            raise odd_answer(SERVER, "its token_ids differ from the tokens of its logprobs")
        weights = choice.get("weight_versions")
        if token_ids and not weights:
            raise odd_answer(
                SERVER,
                "it does not contain the weights that sampled the tokens (weight_versions)",
            )
        return Answer(
            SERVER,
            token_ids,
            [_logprob(row["logprob"]) for row in rows],
            reason,
            [(str(w["version"]), int(w["start"]), int(w["end"])) for w in weights or ()],
            int(said["usage"]["prompt_tokens"]),
            _num_cached(said) or 0,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise odd_answer(SERVER, f"{type(e).__name__}: {e}") from e


def load_of(said: Any) -> tuple[int, int, float]:
    """Return the numbers of running and waiting requests, and the share of the KV cache in use.

    Args:
        said: The metrics in Prometheus' text format, one line for each replica.
    """
    found: dict[str, list[float]] = {}
    for line in str(said).splitlines():
        name, _, rest = line.partition("{")
        if rest:
            found.setdefault(name, []).append(float(rest.rpartition(" ")[2]))
    running, waiting = (
        sum(found.get(f"vllm:num_requests_{s}", ())) for s in ("running", "waiting")
    )
    return int(running), int(waiting), max(found.get("vllm:kv_cache_usage_perc", (0.0,)))


def _num_cached(said: Any) -> int | None:
    """Return the number of cached prompt tokens; None if the server does not tell it."""
    details = said["usage"].get("prompt_tokens_details")
    return None if details is None else int(details.get("cached_tokens") or 0)


def _logprob(value: Any) -> float:
    return math.nan if float(value) <= _NO_LOGPROB else float(value)


def _reason(said: Any) -> FinishReason:
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    return reasons[said]


async def _version(client: ServerClient) -> str:
    try:
        return f"version {(await client.get(VERSION))['version']}"
    except (InferenceFailure, TimeoutError, KeyError, TypeError) as e:
        raise ConfigError(
            f"engine: the server at {client.url} does not return vLLM's version; set engine.url to "
            f"a server of {TESTED}"
        ) from e


async def _lacks(client: ServerClient, more: Sequence[str] = ()) -> str | None:
    """Return which endpoints are missing; a GET of the others is answered with 405."""
    missing = []
    for path in (*POSTED, *more, WEIGHTS):
        try:
            await client.get(path)
        except ServerRefusal as e:
            if e.status == 404:
                missing.append(path)
    if not missing:
        return None
    return (
        f"lacks {', '.join(missing)}, which the run needs: use {TESTED}, and start it with "
        "VLLM_SERVER_DEV_MODE=1 in its environment"
    )


def _architectures(folder: str) -> tuple[str, ...]:
    """Return the architectures of a server's model if its folder is on this machine."""
    is_here = (Path(folder) / "config.json").is_file()
    return tuple(model_config(folder).get("architectures") or ()) if is_here else ()


def _visible(first: int, num: int) -> str:
    """Return the ids of ``num`` GPUs from ``first`` among those visible to this process.

    Raises:
        ConfigError: If there are too few.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not given:
        return ",".join(map(str, range(first, first + num)))
    ids = given.split(",")
    if len(ids) < first + num:
        raise ConfigError(
            f"engine: a vLLM server needs the GPUs {first} to {first + num - 1}, but "
            f"CUDA_VISIBLE_DEVICES has {len(ids)}: {given}"
        )
    return ",".join(ids[first : first + num])
