"""Options of the weight channels. Never imports torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from rollart_core.config.base import Bytes, PositiveInt, Seconds

BUCKET_BYTES = 256 * 2**20


class _ChannelConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: PositiveInt = 2
    """Number of newest policy versions that can be fetched."""
    bucket_bytes: Bytes = BUCKET_BYTES
    """Approximate number of bytes that are copied, written or sent in one operation."""


class SharedMemoryConfig(_ChannelConfig):
    """Options of ``rollart/SharedMemory-v1``."""


class DiskConfig(_ChannelConfig):
    """Options of ``rollart/Disk-v1``."""


class CollectiveConfig(_ChannelConfig):
    """Options of ``rollart/Collective-v1``."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """Backend of the broadcast. ``nccl`` requires a CUDA device for the trainer and every
    engine."""
    host: str = "127.0.0.1"
    """Address of the trainer from the engines' point of view. Engines on other machines require
    another address than the default."""
    timeout_s: Seconds = 60.0
    """Maximum time for one answer of another rank."""
    gather_s: Seconds = 0.2
    """How long a broadcast waits for engines that have not requested the version yet."""


class DeltaConfig(BaseModel):
    """Options of ``rollart/Delta-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    over: str | dict[str, Any] = "shared-memory"
    """Weight channel that transports the changes: its id, or its id and options."""
    keep: PositiveInt = 2
    """Number of newest policy versions that can be fetched."""
    full_every: PositiveInt = 20
    """Interval, in versions, at which the full weights are published. 1: always."""
    compress: Literal["auto", "always", "never"] = "auto"
    """Whether tensors are compressed (deflate) that become at least a tenth smaller. ``auto``: only
    if few elements have changed. ``always``: for slow networks."""

    @model_validator(mode="after")
    def _carrier_exists(self) -> Self:
        from rollart_core.errors import UserError
        from rollart_core.plugins import registry

        options = {"id": self.over} if isinstance(self.over, str) else dict(self.over)
        channel_id = options.pop("id", None)
        if not isinstance(channel_id, str):
            raise ValueError("over requires an id, such as shared-memory")
        if "keep" in options:
            raise ValueError("over.keep has no effect; use keep and full_every instead")
        try:
            spec = registry.find("weight_channels", channel_id).spec
            registry.checked_options("weight_channels", channel_id, options)
        except UserError as e:
            raise ValueError(f"over: {e}") from e
        if getattr(spec, "id", "") == "rollart/Delta-v1":
            raise ValueError("over is the delta channel itself; set it to another weight channel")
        return self
