"""Hardware mappers: which workload runs on which pool.

Takes: nothing. Gives: pools, models, demand and placements as records, and the base of mappers.
Never: reckons; :mod:`rollart_planner` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from rollart_core.contracts.env import Workload
from rollart_core.contracts.spec import PluginSpec

Role = Literal["envs", "engines", "trainer", "rewards"]

TRAINER_REASON: Final = "the trainer"
"""Begins a reason of a placement that concerns the trainer alone, and no environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareMapperSpec(PluginSpec):
    """What a hardware mapper says of itself."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A set of like machines or devices. What is not known is 0."""

    name: str
    device: str
    """``cpu`` (counted in cores), ``serverless`` (counted in calls at once), or an accelerator's
    name, such as ``H100``."""
    count: int
    flops_per_s: float = 0.0
    """Per device, dense, in the model's number format."""
    bytes_per_s: float = 0.0
    """Memory bandwidth per device."""
    memory_bytes: int = 0
    price_per_hour: float = 0.0
    """Per device."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What one device is called in the cluster's own scheduler (Ray's resources)."""
    roles: tuple[Role, ...] = ()
    """What it may be used for; none: whatever fits its device."""
    step_s: float = 0.0
    """What an engine's step takes there besides arithmetic and traffic."""
    per_node: int = 0
    """Devices of one machine: an engine over several devices has all of them there."""
    host_memory_bytes: int = 0
    """Of one machine, not of its devices."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how long it takes."""

    num_params: int
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    bytes_per_value: float = 2.0
    """Of weights and KV cache: 2 for bfloat16, 4 for float32."""
    num_active_params: int = 0
    """Of a mixture of experts: parameters that one token goes through; 0: all."""
    num_experts: int = 0
    """Experts of a layer; 0: it is no mixture."""
    experts_per_token: int = 0
    """Experts of a layer that one token goes through."""
    width: int = 0
    """Of the residual stream."""
    num_outer_params: int = 0
    """Those outside of the layers: embeddings and head."""
    vocab_size: int = 0
    """Tokens; 0: not known."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.num_params * self.bytes_per_value

    @property
    def active_params(self) -> int:
        """Parameters that one token goes through."""
        return self.num_active_params or self.num_params

    @property
    def expert_params(self) -> float:
        """Parameters of all experts of all layers.

        From ``total = shared + X`` and ``active = shared + X k / E``, for k of E experts a token.
        """
        if not self.num_experts:
            return 0.0
        idle = 1 - self.experts_per_token / self.num_experts
        return (self.num_params - self.active_params) / idle if idle else 0.0

    def touched_bytes(self, num_tokens: float) -> float:
        """Return the bytes of weights that a step of ``num_tokens`` tokens reads.

        Of a mixture, a token goes through k of E experts. Were they drawn alike and by each token
        for itself, n tokens would leave one out with probability ``(1 - k / E)^n``; so
        ``E (1 - (1 - k / E)^n)`` of a layer are read. Real routers prefer some: then it is less.
        """
        if not self.num_experts:
            return self.weight_bytes
        idle = 1 - self.experts_per_token / self.num_experts
        left_out: float = idle ** max(1.0, num_tokens)
        return self.weight_bytes - self.expert_params * left_out * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values one token leaves in the cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of the hardware besides its environments' workloads."""

    model: ModelShape | None = None
    """None: not known (yet)."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Env id -> its share of the trajectories, on any scale; one that is missing has 1."""
    max_concurrent: int = 256
    """Most episodes at once."""
    num_engines: int | None = None
    """Inference engines of the run; None: as many as there is room for."""
    engine_devices: int = 1
    """Devices of one engine, all of one machine."""
    num_trainer_ranks: int = 1
    """Trainer ranks, a device each."""
    recomputes: bool = False
    """Whether the trainer computes each layer again for its backward pass."""
    stateless_rewards: bool = False
    """Whether rewards may run on a serverless pool."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a placement should give, by the model of :mod:`rollart_planner`."""

    trajectories_per_s: float
    envs: Mapping[str, float]
    """Env id -> trajectories/s."""
    pools: Mapping[str, float]
    """Pool -> share of its devices' time in use, the trainer's devices included."""
    turn_s: Mapping[str, Mapping[str, tuple[float, float]]]
    """Env id -> pool -> seconds of a device for one turn: prefill and decode."""
    bottleneck: str
    """What there would have to be more of to be faster; a sentence."""
    price_per_hour: float = 0.0
    """Of the devices in use."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything goes. Pool names only."""

    envs: Mapping[str, str]
    """Env id -> pool of its workers."""
    engines: Mapping[str, Mapping[str, float]]
    """Env id -> pool -> share of its trajectories generated there (shares add up to 1)."""
    trainer: str
    rewards: str = "inline"
    """``inline``: beside the environments; or the name of a serverless pool."""
    reasons: tuple[str, ...] = field(default_factory=tuple)
    """Why, a sentence each."""
    num_engines: Mapping[str, int] = field(default_factory=dict)
    """Pool -> inference engines there; empty: the mapper leaves it to the runtime."""
    expected: Expectation | None = None
    """None: the mapper does not reckon with rates."""


class HardwareMapper(ABC):
    """Base of hardware mappers."""

    demand: Demand = Demand()
    """What else is known of the run; set before ``place``, and free to ignore."""

    @abstractmethod
    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Map each env's workload to pools.

        Args:
            workloads: Env id -> workload, declared or measured.
            pools: What there is.

        Raises:
            ValueError: When the pools cannot carry the workloads; says which and why.
        """
