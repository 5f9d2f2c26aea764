"""Options of the embedded engine.

Takes: what stands under ``engine`` of a run. Gives: a pydantic model. Never: imports torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from rollart_core.config.base import Bytes, PositiveInt


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
