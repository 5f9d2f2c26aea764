"""Options of the weight channels. Never imports torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

BUCKET_BYTES = 64 * 2**20

PositiveInt = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class _ChannelConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest policy versions can be fetched."""
    bucket_bytes: PositiveInt = BUCKET_BYTES
    """About how much is copied, written or sent at once."""


class SharedMemoryConfig(_ChannelConfig):
    """Options of ``rollart/SharedMemory-v1``."""


class DiskConfig(_ChannelConfig):
    """Options of ``rollart/Disk-v1``."""
