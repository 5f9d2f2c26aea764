"""Options of the engines that ask OpenAI-compatible servers. Never imports aiohttp or torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Count, NonNegative, Seconds


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
