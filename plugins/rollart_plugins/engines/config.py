"""Options of the embedded engine.

Takes: what stands under ``engine`` of a run. Gives: a pydantic model. Never: imports torch.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollart_core.config.base import Bytes, Count, NonNegative, PositiveInt, Seconds


class EmbeddedConfig(BaseModel):
    """What a run config may say under ``engine``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sessions: PositiveInt = 256
    """Rows of the KV cache: sessions kept at once. On a CPU memory is taken as it is used."""
    max_batch_tokens: PositiveInt = 1024
    """Most tokens computed in one step. Raised to ``max_sessions`` where it is less."""
    kv_cache_bytes: Bytes = 4 * 2**30
    """The KV cache is given fewer rows when it would outgrow this."""
    share_prefixes: bool = True
    """Sessions of one group copy the KV of their common prefix from one another."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What weights are multiplied in; ``auto``: float32 on a CPU, the model's dtype elsewhere."""
    weight_buffers: Literal[1, 2] = 2
    """2: new weights are prepared in a second set while tokens are generated, and a swap takes
    microseconds; 1: the memory of one set, and nothing is generated while they are copied."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """``native``: CPU kernels compiled at first use by the machine's C compiler."""
    decoder: Literal["auto", "own", "transformers"] = "auto"
    """``auto``: our own for the Llama, Mistral, Qwen2 and Qwen3 family, else transformers."""


class ServerConfig(BaseModel):
    """What all engines that ask an OpenAI-compatible server are told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """Such as ``http://127.0.0.1:8000/v1``: what comes before ``/chat/completions``."""
    model: str | None = None
    """What the server calls the model; none: the one it has, where it has only one."""
    api_key_env: str | None = None
    """The variable of the environment that holds the key; none: ``OPENAI_API_KEY`` where it is set.
    The key itself never stands in a config."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request; they are kept in the run's ``config.yaml``, so no secrets here."""
    answer_s: Seconds = 600.0
    """How long one answer may take; ``deadlines.generate_s`` bounds it with all its retries."""
    num_retries: Count = 6
    """How often a request is sent again that met no connection, a limit of requests (429, after
    ``Retry-After``) or a server error."""


class OpenAIConfig(ServerConfig):
    """What a run config may say under ``engine`` with ``id: openai``."""

    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """How a chat request says how many tokens it wants at most; newer models of some providers take
    ``max_completion_tokens`` only."""
    omit: tuple[Literal["temperature", "seed", "max_tokens"], ...] = ()
    """What a chat request leaves out, for servers that refuse it. What is left out is the server's
    own choice: sampled and greedy may then be the same."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Added to every request as it is, such as ``{reasoning_effort: low}``."""

    def missing(self) -> dict[str, str]:
        """Return the package, or the key, that is not there."""
        found = {}
        if find_spec("aiohttp") is None:
            found["id"] = "aiohttp is not installed: pip install 'rollart[gateway]'"
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            found["api_key_env"] = f"the environment has no variable {self.api_key_env}"
        return found


class VllmConfig(ServerConfig):
    """What a run config may say under ``engine`` with ``id: vllm``."""

    weights_dir: str | None = None
    """Where new weights are written for the server to read: a folder that both see. None: one in
    the temporary folder, for a server on the same machine."""
    logprobs: Literal["raw", "processed"] = "raw"
    """The server's ``--logprobs-mode``, without ``_logprobs``. Raw ones are those of temperature 1,
    so training at another ``rollout.temperature`` needs ``processed``."""
    start_s: NonNegative = 30.0
    """How long a server is waited for that does not listen (yet, or any more)."""


LAUNCH_ONLY = ("command", "tp_size", "first_gpu", "server_args", "environment")
"""What has no effect on servers that run already."""


_GPU_ARGS = {
    "tp_size": "give engine.tp_size",
    "tensor_parallel_size": "give engine.tp_size",
    "base_gpu_id": "give engine.first_gpu",
    "pp_size": "an engine is split by tp_size alone",
    "pipeline_parallel_size": "an engine is split by tp_size alone",
    "nnodes": "an engine is on one machine; have more engines",
}
"""Flags of a server that say which GPUs it takes, and what to say instead."""


class SGLangConfig(BaseModel):
    """What a run config may say under ``engine``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: tuple[str, ...] = ()
    """Running servers to attach to, one for each engine, such as ``http://10.0.0.5:30000``; none: a
    server is launched for each engine, and ends with it."""
    command: tuple[str, ...] = ()
    """What launches a server, before its flags; none: ``python -m sglang.launch_server`` with the
    run's own Python. SGLang is often in an environment of its own:
    ``[/opt/sglang/bin/python, -m, sglang.launch_server]``."""
    tp_size: PositiveInt = 1
    """GPUs that the layers of one server are split over."""
    first_gpu: Count = 0
    """The first server takes ``tp_size`` GPUs from this one on, the second those after them. With
    ``runtime: inline`` only: Ray gives each server GPUs of its own."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further flags of the server, such as ``{mem_fraction_static: 0.8, enable_metrics: true}``."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the server."""
    weight_road: Literal["tensor", "disk", "distributed"] = "tensor"
    """How weights go on from the engine's process to its server: ``tensor`` in the request itself,
    ``disk`` as a model folder that both can read, ``distributed`` by a broadcast."""
    weights_folder: str | None = None
    """For ``disk``: where; none: a temporary folder of this machine."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """For ``distributed``: what carries the broadcast; ``auto``: nccl where the server is on CUDA,
    on another machine (``url``, and a ``host`` that is not the loopback address), else gloo. NCCL
    refuses two ranks on one GPU, so ``nccl`` is refused for servers that are launched."""
    host: str = "127.0.0.1"
    """For ``distributed``: the address of this machine as the server sees it."""
    bucket_bytes: Bytes = 256 * 2**20
    """About how much goes to the server at once, by ``tensor`` and ``distributed``."""
    start_s: Seconds = 600.0
    """The longest wait until a server answers."""
    update_s: Seconds = 100.0
    """The longest wait for the server's answer to new weights; then it counts as dead."""
    look_every_s: Seconds = 5.0
    """How often the server is asked whether it lives."""
    silent_s: Seconds = 60.0
    """One that has given no answer for this long is dead."""
    api_key_variable: str | None = None
    """The environment variable that holds the key of a running server, where it wants one."""

    @field_validator("url", "command", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no address: http://HOST:PORT is one")
        if len(set(value)) != len(value):
            raise ValueError("each engine needs a server of its own: one is named twice")
        return tuple(url.rstrip("/") for url in value)

    @field_validator("server_args")
    @classmethod
    def _gpus_are_counted(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, mend in _GPU_ARGS.items():
            if key in value or key.replace("_", "-") in value:
                raise ValueError(f"{key} would take GPUs that nobody counts: {mend}")
        return value

    @model_validator(mode="after")
    def _all_has_effect(self) -> Self:
        fields = type(self).model_fields  # a resolved run gives every key, most as they were
        for key, why in self._idle():
            if getattr(self, key) != fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} has no effect with {why}; remove it")
        return self

    @model_validator(mode="after")
    def _nccl_has_two_gpus(self) -> Self:
        if self.backend == "nccl" and not self.url:
            raise ValueError(
                "backend: nccl is for servers that run already (url): one that is launched here "
                "shares its first GPU with the engine's process, which NCCL refuses; take gloo, "
                "or weight_road: tensor"
            )
        return self

    def missing(self) -> dict[str, str]:
        """Return what a server is launched with and this machine has not."""
        if self.url:
            return {}
        if not self.command:
            if find_spec("sglang") is not None:
                return {}
            return {
                "command": "is not given, and this Python has no sglang: give one, such as "
                "[/opt/sglang/bin/python, -m, sglang.launch_server], or url of a running server"
            }
        program, *rest = self.command
        if which(program) is None:
            return {"command": f"there is no program {program!r} here"}
        scripts = [part for part in rest if part.endswith(".py") and not Path(part).is_file()]
        return {"command": f"there is no file {scripts[0]!r} here"} if scripts else {}

    def _idle(self) -> list[tuple[str, str]]:
        """Return keys that have no effect, each with the reason."""
        found = [(key, "url (the server runs already)") for key in LAUNCH_ONLY if self.url]
        if not self.url:
            found.append(("api_key_variable", "servers that are launched here"))
        road = self.weight_road
        found += [("weights_folder", f"weight_road: {road}")] if road != "disk" else []
        if road != "distributed":
            found += [(key, f"weight_road: {road}") for key in ("backend", "host")]
        found += [("bucket_bytes", "weight_road: disk")] if road == "disk" else []
        return found
