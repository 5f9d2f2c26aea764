"""The SGLang engine: a server process that it launches, or a server that is already running.

Takes: the calls of a :class:`ServerEngine`. Gives: requests of SGLang's protocol.
Never: uses a server with another model, or with several replicas.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar

from rollart_core.contracts.inference import GenerateRequest
from rollart_core.errors import ConfigError, EngineDied, InferenceFailure
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.config import EngineServerConfig, SGLangConfig
from rollart_plugins.engines.server_adapters import (
    NUM_ADAPTERS,
    empty_adapter,
    matrices,
)
from rollart_plugins.engines.server_answers import Answer, Json
from rollart_plugins.engines.server_checks import ServerFacts, tokenizer_trouble
from rollart_plugins.engines.server_client import ServerClient
from rollart_plugins.engines.server_engine import ServerEngine, SleepingPart
from rollart_plugins.engines.server_process import launcher
from rollart_plugins.engines.sglang_weights import SGLangTransport
from rollart_plugins.engines.weight_transport import WeightTransport


class SGLangEngine(ServerEngine):
    """One SGLang server; see :class:`ServerEngine` for the arguments."""

    server: ClassVar[str] = dialect.SERVER
    adapter_endpoints: ClassVar[tuple[str, str]] = (dialect.LOAD_ADAPTER, dialect.UNLOAD_ADAPTER)
    adapter_flags: ClassVar[str] = (
        "--enable-lora, --max-lora-rank {rank} or more, --lora-target-modules with these matrices "
        "and --max-loras-per-batch 4"
    )
    answers_in_pause: ClassVar[bool] = False
    config_type: ClassVar[type[EngineServerConfig]] = SGLangConfig
    _config: SGLangConfig

    def _command_line(self, port: int, first_gpu: int | None) -> tuple[list[str], dict[str, str]]:
        config, on_cpu = self._config, first_gpu is None
        options: Json = {"tp_size": config.tp_size}
        if first_gpu is not None:
            options["base_gpu_id"] = first_gpu
        options |= {
            "model_path": self._model_path,
            "dtype": self._dtype,
            "context_length": self._max_tokens + dialect.CONTEXT_MARGIN,
            "weight_version": self._first_tag(),
            # with overlap, a step in flight would assign its tokens to the next weights
            "disable_overlap_schedule": self._keep_kv,
            **self._adapter_options(),
            "enable_memory_saver": self._sleeps and not on_cpu,
            **config.server_args,
            "host": "127.0.0.1",
            "port": port,
        }
        argv = launcher(config.command, config.package, config.start_args)
        return argv + dialect.flags(options, on_cpu=on_cpu), dialect.environment(
            config.environment, on_cpu=on_cpu
        )

    def _adapter_options(self) -> Json:
        if self._lora is None:
            return {}
        known = matrices(empty_adapter(self._facts.shapes, self._lora))
        return {
            "enable_lora": True,
            "max_lora_rank": self._lora.rank,
            "lora_target_modules": known or list(self._lora.target_modules or ("all",)),
            "max_loras_per_batch": NUM_ADAPTERS,
        }

    async def _check(self, client: ServerClient) -> ServerFacts:
        info = await client.get(dialect.MODEL_INFO)
        about = await client.get(dialect.SERVER_INFO)
        trouble = self._trouble(info, about)
        if trouble is None and self._process is None:
            folder = str(info.get("tokenizer_path") or info.get("model_path") or "")
            path = None if about.get("skip_tokenizer_init") else dialect.TOKENIZE
            trouble = await tokenizer_trouble(client, self._facts, folder, path)
        if trouble is not None:
            raise ConfigError(f"engine: the SGLang server at {client.url} {trouble}")
        return ServerFacts(
            weight_version=str(info.get("weight_version")),
            tp_size=int(about.get("tp_size") or 1),
            device=str(about.get("device") or ""),
        )

    def _trouble(self, info: Json, about: Json) -> str | None:
        model, max_tokens = self._facts, self._max_tokens
        weights = str(info.get("weight_version"))
        if self._process is None and (trouble := self._changed_base(weights)):
            return trouble
        theirs = tuple(info.get("architectures") or ())
        if model.architectures and theirs and theirs != model.architectures:
            return f"has the model {theirs[0]}, but the run's model is {model.architectures[0]}"
        if int(about.get("dp_size") or 1) != 1:
            return (
                "has several replicas (dp_size), which do not support weight updates; use more "
                "engines instead"
            )
        limit = about.get("max_req_input_len")
        if limit is not None and int(limit) + 1 < max_tokens:
            return (
                f"accepts at most {limit} tokens, but rollout.max_context_tokens is {max_tokens}: "
                f"start it with --context-length {max_tokens + dialect.CONTEXT_MARGIN}, or lower "
                "rollout.max_context_tokens"
            )
        if self._keep_kv and not about.get("disable_overlap_schedule"):
            return (
                "uses the overlap schedule, which would assign a token to the next weights: start "
                "it with --disable-overlap-schedule, or use rollout.kv_on_swap: recompute"
            )
        is_on_gpu = about.get("device") not in ("cpu", None)
        if self._sleeps and is_on_gpu and not about.get("enable_memory_saver"):
            return (
                "cannot free its GPU's memory, which runtime.colocate needs: start it with "
                "--enable-memory-saver"
            )
        cache = about.get("max_total_num_tokens")
        if cache is not None and int(cache) < max_tokens:
            return f"has a KV cache of {cache} tokens, too small for a row of {max_tokens}"
        return None

    def _new_transport(self, client: ServerClient, seen: ServerFacts) -> WeightTransport:
        return SGLangTransport(self._config, client, self._model_path, seen.tp_size)

    async def _ask(
        self,
        client: ServerClient,
        request: GenerateRequest,
        rid: str,
        max_new_tokens: int,
        adapter: str,
    ) -> Answer:
        body = dialect.generate_body(request, rid, max_new_tokens)
        if adapter:
            body["lora_path"] = adapter
        return dialect.read_answer(await client.post(dialect.GENERATE, body, limit_s=None))

    async def _ask_abort(self, client: ServerClient, rid: str) -> None:
        await client.post(dialect.ABORT, {"rid": rid})

    async def _ask_pause(self, client: ServerClient, *, keep_kv: bool) -> None:
        await client.post(dialect.PAUSE, {"mode": "in_place" if keep_kv else "retract"})

    async def _ask_continue(self, client: ServerClient) -> None:
        await client.post(dialect.CONTINUE)

    async def _ask_sleep(self, client: ServerClient) -> None:
        await client.post(dialect.RELEASE_MEMORY, {"tags": ["weights", "kv_cache"]}, limit_s=None)

    async def _ask_wake(self, client: ServerClient, part: SleepingPart) -> None:
        await client.post(dialect.RESUME_MEMORY, {"tags": [part]}, limit_s=None)

    async def _end_swap(self, client: ServerClient) -> None:
        with contextlib.suppress(EngineDied, InferenceFailure, TimeoutError):
            await client.post(dialect.END_UPDATE)
        await client.post(dialect.CONTINUE)

    async def _load(self, client: ServerClient) -> tuple[int, int, float]:
        return dialect.load_of(await client.get(dialect.LOADS))
