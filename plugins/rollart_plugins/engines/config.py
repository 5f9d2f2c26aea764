"""Options of the inference engines.

Takes: the ``engine`` section of a run config. Gives: a pydantic model. Never: imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollart_core.config.base import (
    Bytes,
    Count,
    PositiveInt,
    Seconds,
    old_names,
)


class EmbeddedConfig(BaseModel):
    """Options of the embedded engine, in ``engine``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sessions: PositiveInt = 256
    """Number of rows of the KV cache, which is the number of sessions that are kept at the same
    time. On a CPU, the memory is only allocated as it is used."""
    max_batch_tokens: PositiveInt = 1024
    """Maximum number of tokens computed in one step. Raised to ``max_sessions`` if it is
    smaller."""
    kv_cache_bytes: Bytes = 4 * 2**30
    """Maximum size of the KV cache. The cache gets fewer rows if it would be larger."""
    share_prefixes: bool = True
    """Whether sessions of one group copy the KV of their common prefix from each other."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the matrix multiplications. ``auto``: float32 on a CPU, otherwise the dtype of
    the model."""
    weight_buffers: Literal[1, 2] = 2
    """Number of weight sets in memory. 2: new weights are prepared in a second set during
    generation, and the swap takes microseconds. 1: only one set is in memory, and generation stops
    while new weights are copied."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """Kernels to use. ``native``: CPU kernels that the C compiler of the machine compiles at first
    use."""
    decoder: Literal["auto", "own", "transformers"] = "auto"
    """Decoder implementation. ``auto``: RollArt's own decoder for the Llama, Mistral, Qwen2 and
    Qwen3 families, otherwise transformers."""


class ServerConfig(BaseModel):
    """Options that all clients of an OpenAI-compatible server have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """The URL before ``/chat/completions``, such as ``http://127.0.0.1:8000/v1``."""
    model: str | None = None
    """Name of the model on the server. If not set, the server must have exactly one model, which is
    used."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. If not set, ``OPENAI_API_KEY`` is used if it
    exists. A config never contains the key itself."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request. They are saved in the ``config.yaml`` of the run, so they must not
    contain secrets."""
    answer_s: Seconds = 600.0
    """Maximum time for one response. ``deadlines.generate_s`` limits the total time including
    retries."""
    num_retries: Count = 6
    """How often a request is retried after a connection failure, a rate limit (429, after
    ``Retry-After``) or a server error."""


class OpenAIConfig(ServerConfig):
    """Options of the ``openai`` engine, in ``engine``."""

    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Field of a chat request that limits the number of generated tokens. Newer models of some
    providers only accept ``max_completion_tokens``."""
    omit: tuple[Literal["temperature", "seed", "max_tokens"], ...] = ()
    """Fields that a chat request omits, for servers that reject them. The server then uses its own
    defaults, so sampled and greedy output can be the same."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Fields that are added to every request unchanged, such as ``{reasoning_effort: low}``."""

    def missing(self) -> dict[str, str]:
        """Return the missing package or API key, by option."""
        found = {}
        if find_spec("aiohttp") is None:
            found["id"] = "aiohttp is not installed: pip install 'rollart[gateway]'"
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            found["api_key_env"] = f"the environment variable {self.api_key_env} is not set"
        return found


LAUNCH_ONLY = ("command", "tp_size", "first_gpu", "server_args", "environment")
"""Options that have no effect with servers that are already running."""


class EngineServerConfig(BaseModel):
    """Options that the engines of inference servers have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: ClassVar[str]
    """The server's Python package."""
    start_args: ClassVar[tuple[str, ...]]
    """Arguments of ``python`` that launch a server."""
    reserved_args: ClassVar[Mapping[str, str]]
    """Server flags that this engine sets or that select GPUs, and what to set instead."""

    url: tuple[str, ...] = ()
    """Running servers to connect to, one for each engine, such as ``http://10.0.0.5:30000``. If not
    set, each engine launches a server and stops it when the engine closes."""
    command: tuple[str, ...] = ()
    """Command that launches a server, without its flags."""
    tp_size: PositiveInt = 1
    """Number of GPUs of one server (tensor parallelism)."""
    first_gpu: Count = 0
    """Index of the first GPU. The first server uses ``tp_size`` GPUs starting at this one, the
    second server the GPUs after those. Only used with ``runtime: inline``, because Ray assigns GPUs
    to each server."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Additional flags of the server."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the server."""
    weights_folder: str | None = None
    """Folder in which new weights are written for the server. If not set, a temporary folder on
    this machine."""
    start_s: Seconds = 600.0
    """Maximum time until a server is ready."""
    update_s: Seconds = 100.0
    """Maximum time until the server confirms new weights. After it, the server counts as dead."""
    look_every_s: Seconds = 5.0
    """Interval of the health checks of the server."""
    silent_s: Seconds = 60.0
    """A server that has not responded for this long counts as dead."""
    api_key_variable: str | None = None
    """Environment variable that holds the API key of a running server, if the server requires
    one."""

    @field_validator("url", "command", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not a server URL; use http://HOST:PORT")
        if len(set(value)) != len(value):
            raise ValueError("each engine needs its own server, but one URL is given twice")
        return tuple(url.rstrip("/") for url in value)

    @field_validator("server_args")
    @classmethod
    def _is_not_reserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, mend in cls.reserved_args.items():
            if key in value or key.replace("_", "-") in value:
                raise ValueError(f"{key} {mend}")
        return value

    @model_validator(mode="after")
    def _all_has_effect(self) -> Self:
        fields = type(self).model_fields  # a resolved run sets every key
        for key, why in self._idle():
            if getattr(self, key) != fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} has no effect with {why}; remove it")
        return self

    def missing(self) -> dict[str, str]:
        """Return what is missing on this machine to launch or query a server, by option."""
        if self.url:
            key = self.api_key_variable
            unset = f"the environment variable {key} is not set"
            return {} if key is None or os.environ.get(key) else {"api_key_variable": unset}
        package = self.package
        if not self.command:
            if find_spec(package) is not None:
                return {}
            command = f"[/opt/{package}/bin/python, {', '.join(self.start_args)}]"
            return {
                "command": f"is not set, and this Python has no {package}: set it, such as "
                f"{command}, or set url of a running server"
            }
        program, *rest = self.command
        if which(program) is None:
            return {"command": f"the program {program!r} is not on this machine"}
        scripts = [part for part in rest if part.endswith(".py") and not Path(part).is_file()]
        return {"command": f"the file {scripts[0]!r} is not on this machine"} if scripts else {}

    def _idle(self) -> list[tuple[str, str]]:
        """Return the keys that have no effect, each with the reason."""
        if self.url:
            return [(key, "url (the server is already running)") for key in LAUNCH_ONLY]
        return [("api_key_variable", "servers that this run launches")]


_MORE_GPUS = "would use GPUs that the run does not reserve: "
_SPLIT = _MORE_GPUS + "an engine is only split by engine.tp_size"
_TP = _MORE_GPUS + "set engine.tp_size instead"
_REPLICAS = ("dp_size", "data_parallel_size")
_PARTS = (*_REPLICAS, "ep_size", "expert_parallel_size", "moe_dp_size", "attn_dp_size")
"""Flags of SGLang that divide the ``tp_size`` GPUs of a server among groups of ranks."""
_NODES = _MORE_GPUS + "an engine runs on one machine; use more engines instead"


class VllmConfig(EngineServerConfig):
    """Options of the ``vllm`` engine, in ``engine``."""

    _old_names = old_names(
        base_url="url", weights_dir="weights_folder", api_key_env="api_key_variable"
    )
    package: ClassVar[str] = "vllm"
    start_args: ClassVar[tuple[str, ...]] = ("-m", "vllm.entrypoints.cli.main", "serve")
    reserved_args: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": _TP,
        "pipeline_parallel_size": _SPLIT,
        "data_parallel_size": _MORE_GPUS + "use more engines instead",
        "nnodes": _NODES,
        "logprobs_mode": "is always processed_logprobs, which training requires; remove it",
    }

    command: tuple[str, ...] = ()
    """Command that launches a server, without its model and flags. If not set, ``python -m
    vllm.entrypoints.cli.main serve`` with the Python of the run. If vLLM is installed in another
    Python environment, use its Python: ``[/opt/vllm/bin/python, -m, vllm.entrypoints.cli.main,
    serve]``."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Additional flags of the server, such as ``{gpu_memory_utilization: 0.8}``."""

    @field_validator("url")
    @classmethod
    def _is_the_root(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(url.removesuffix("/v1") for url in value)  # base_url ended with it


class SGLangConfig(EngineServerConfig):
    """Options of the ``sglang`` engine, in ``engine``."""

    package: ClassVar[str] = "sglang"
    start_args: ClassVar[tuple[str, ...]] = ("-m", "sglang.launch_server")
    reserved_args: ClassVar[Mapping[str, str]] = {
        "tp_size": _TP,
        "tensor_parallel_size": _TP,
        "base_gpu_id": _MORE_GPUS + "set engine.first_gpu instead",
        "pp_size": _SPLIT,
        "pipeline_parallel_size": _SPLIT,
        "nnodes": _NODES,
    }

    command: tuple[str, ...] = ()
    """Command that launches a server, without its flags. If not set, ``python -m
    sglang.launch_server`` with the Python of the run. If SGLang is installed in another Python
    environment, use its Python: ``[/opt/sglang/bin/python, -m, sglang.launch_server]``."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Additional flags of the server, such as ``{mem_fraction_static: 0.8, enable_metrics:
    true}``."""
    weights_folder: str | None = None
    """Folder that this machine and the server can read, for new weights. It is not used if the
    server can join the broadcast of the weight channel, or load its files. If not set, weights are
    then sent in requests."""
    bucket_bytes: Bytes = 256 * 2**20
    """Approximate number of bytes in one request with weights, or in one file of
    ``weights_folder``."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_transport(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for key in ("weight_transport", "weight_road", "backend", "host"):
                if key in given:
                    raise ValueError(
                        f"{key} was removed: servers join the broadcast of weights: collective "
                        "(with its backend and host) and load the files of weights: shared-memory "
                        "and disk. Other weights are written to weights_folder, or sent in requests"
                    )
        return given

    @model_validator(mode="after")
    def _mesh_has_all_gpus(self) -> Self:
        given = {key.replace("-", "_"): value for key, value in self.server_args.items()}
        for key in _PARTS:
            size = given.get(key, 1)
            if key in _REPLICAS and size != 1 and not given.get("enable_dp_attention"):
                raise ValueError(
                    f"server_args has {key}: {size}, so that a server would use {size} x "
                    f"{self.tp_size} GPUs, but the run reserves {self.tp_size} (engine.tp_size): "
                    "use more engines, or add enable_dp_attention: true"
                )
            if not isinstance(size, int) or size < 1 or self.tp_size % size:
                raise ValueError(
                    f"server_args has {key}: {size}, which does not divide the {self.tp_size} GPUs "
                    f"of a server (engine.tp_size): use one of {_divisors(self.tp_size)}"
                )
        return self


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
