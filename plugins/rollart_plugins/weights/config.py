"""Options of the weight channels. Never imports torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class _FolderConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest policy versions can be fetched."""


class SharedMemoryConfig(_FolderConfig):
    """Options of ``rollart/SharedMemory-v1``."""


class DiskConfig(_FolderConfig):
    """Options of ``rollart/Disk-v1``."""
