"""Options of environments that run in a sandbox: which sandbox, and its pool.

Takes: the options of a run config. Gives: frozen models. Never: imports a sandbox plugin.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rollart_core.config.base import Bytes, Count, PluginRef, PositiveInt, Seconds, old_names

_MIB = 1 << 20


class PoolOptions(BaseModel):
    """How many sandboxes may exist, and how many are kept ready."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _old_names = old_names(max_boxes="max_sandboxes")

    warm: Count = 0
    """Number of sandboxes that each process keeps ready for its next episodes. Increase it if
    resets wait for sandboxes to start."""
    max_sandboxes: PositiveInt | None = None
    """Maximum number of live sandboxes on the machine, over all your runs. Default: 32 per
    processor."""
    concurrent_starts: PositiveInt | None = None
    """Maximum number of sandboxes on the machine that start concurrently. Default: one per
    processor, at least two."""
    reserve_bytes: Bytes = 256 * _MIB
    """Memory that a sandbox is expected to use, at most its ``memory_bytes``. Admission of new
    sandboxes is based on it."""
    wait_s: Seconds | None = None
    """Maximum seconds to wait for capacity. Default: 80% of ``deadlines.reset_s`` in a run, one
    minute elsewhere."""


class SandboxedOptions(BaseModel):
    """Base of the config models of environments that run in a sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sandbox: PluginRef = PluginRef(id="docker")
    """The sandbox, by id or alias, with its options (`rollart list sandboxes`)."""
    pool: PoolOptions = PoolOptions()
    """How many sandboxes may exist, and how many are kept ready."""
