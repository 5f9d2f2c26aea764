"""Options of the weight channels. Never imports torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from rollart_core.config.base import Bytes, PositiveInt, Seconds

BUCKET_BYTES = 64 * 2**20


class _ChannelConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: PositiveInt = 2
    """How many of the newest policy versions can be fetched."""
    bucket_bytes: Bytes = BUCKET_BYTES
    """About how much is copied, written or sent at once."""


class SharedMemoryConfig(_ChannelConfig):
    """Options of ``rollart/SharedMemory-v1``."""


class DiskConfig(_ChannelConfig):
    """Options of ``rollart/Disk-v1``."""


class CollectiveConfig(_ChannelConfig):
    """Options of ``rollart/Collective-v1``."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """What carries the broadcast; ``nccl`` needs a CUDA device for every end."""
    host: str = "127.0.0.1"
    """The trainer's address as engines see it; those on other machines need another than this."""
    timeout_s: Seconds = 60.0
    """The longest wait for any one answer of another end."""
    gather_s: Seconds = 0.2
    """How long a broadcast waits for engines that have not asked yet."""


class DeltaConfig(BaseModel):
    """Options of ``rollart/Delta-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    over: str | dict[str, Any] = "shared-memory"
    """What carries the changes: another weight channel's id, or its id and options."""
    keep: PositiveInt = 2
    """How many of the newest policy versions can be fetched."""
    full_every: PositiveInt = 20
    """Every how many versions one is whole; 1: all of them."""
    compress: Literal["auto", "always", "never"] = "auto"
    """Deflate what gets a tenth smaller by it; ``auto``: only where few elements have changed,
    ``always``: for slow networks."""

    @model_validator(mode="after")
    def _carrier_exists(self) -> Self:
        from rollart_core.errors import UserError
        from rollart_core.plugins import registry

        options = {"id": self.over} if isinstance(self.over, str) else dict(self.over)
        channel_id = options.pop("id", None)
        if not isinstance(channel_id, str):
            raise ValueError("over needs an id, such as shared-memory")
        if "keep" in options:
            raise ValueError("over.keep has no effect: keep and full_every say what is kept")
        try:
            spec = registry.find("weight_channels", channel_id).spec
            registry.checked_options("weight_channels", channel_id, options)
        except UserError as e:
            raise ValueError(f"over: {e}") from e
        if getattr(spec, "id", "") == "rollart/Delta-v1":
            raise ValueError("over names the delta channel itself; give what is to carry it")
        return self
