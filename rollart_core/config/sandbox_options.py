"""Options of environments that run in a box: which sandbox, and how boxes are kept ready.

Takes: what a run config gives. Gives: frozen models. Never: imports a wall.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rollart_core.config.base import Bytes, Count, PluginRef, PositiveInt, Seconds

_MIB = 1 << 20


class PoolOptions(BaseModel):
    """How many boxes there may be, and how many are kept ready."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    warm: Count = 0
    """Boxes that each process keeps ready for its next episodes."""
    max_boxes: PositiveInt | None = None
    """Most live boxes on the machine, those of all your runs together; none: 32 a processor."""
    concurrent_starts: PositiveInt | None = None
    """Most boxes of the machine that start at once; none: one a processor, two at least."""
    reserve_bytes: Bytes = 256 * _MIB
    """Memory that a box is expected to use; its ``memory_bytes``, which it may use, if less."""
    wait_s: Seconds | None = None
    """Longest wait for room; none: four fifths of ``deadlines.reset_s``, or a minute elsewhere."""


class SandboxedOptions(BaseModel):
    """Base of the config models of environments that run in a box."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sandbox: PluginRef = PluginRef(id="docker")
    """The sandbox, by id or alias, with its options beside it (`rollart list sandboxes`)."""
    pool: PoolOptions = PoolOptions()
    """How many boxes there may be, and how many are kept ready."""
