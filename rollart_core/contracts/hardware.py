"""Hardware mappers: which workload runs on which pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart_core.contracts.env import Workload
from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareMapperSpec(PluginSpec):
    """What a hardware mapper says of itself."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A set of like machines or devices."""

    name: str
    device: str
    """``cpu`` or an accelerator's name, such as ``H100``."""
    count: int
    flops_per_s: float = 0.0
    """Per device."""
    bytes_per_s: float = 0.0
    """Memory bandwidth per device."""
    memory_bytes: int = 0
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything goes. Pool names only."""

    envs: Mapping[str, str]
    """Env id -> pool of its workers."""
    engines: Mapping[str, Mapping[str, float]]
    """Env id -> pool -> share of its trajectories generated there (shares add up to 1)."""
    trainer: str
    rewards: str = "inline"
    reasons: tuple[str, ...] = field(default_factory=tuple)
    """Why, a sentence each."""


class HardwareMapper(ABC):
    """Base of hardware mappers."""

    @abstractmethod
    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Map each env's workload to pools.

        Args:
            workloads: Env id -> workload, declared or measured.
            pools: What there is.

        Raises:
            ValueError: When the pools cannot carry the workloads; says which and why.
        """
