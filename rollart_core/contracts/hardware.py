"""Hardware mappers: decide which workload runs on which pool.

Takes: nothing. Gives: pools, models, demand and placements as records, and the base of mappers.
Never: computes a placement; :mod:`rollart_planner` does.
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
"""The prefix of a placement's reasons that apply to the trainer only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareMapperSpec(PluginSpec):
    """The spec of a hardware mapper."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A set of identical machines or devices. Unknown values are 0."""

    name: str
    """Unique name of the pool."""
    device: str
    """``cpu`` (counted in cores), ``serverless`` (counted in concurrent calls), or the name of an
    accelerator, such as ``H100``."""
    count: int
    """Number of devices, cores or concurrent calls."""
    flops_per_s: float = 0.0
    """Dense FLOP/s per device, in the model's number format."""
    bytes_per_s: float = 0.0
    """Memory bandwidth per device, in bytes/s."""
    memory_bytes: int = 0
    """Memory per device, in bytes."""
    price_per_hour: float = 0.0
    """Price per device and hour."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources that one device takes in the cluster's scheduler (Ray's custom resources)."""
    roles: tuple[Role, ...] = ()
    """Allowed uses. If empty, every use that fits the device."""
    step_s: float = 0.0
    """Seconds of fixed overhead per engine step, in addition to compute and memory traffic."""
    per_node: int = 0
    """Devices per machine. All devices of one engine are on one machine."""
    host_memory_bytes: int = 0
    """Host memory of one machine, in bytes. Device memory is not included."""
    training_flops_per_s: float = 0.0
    """FLOP/s per device in the training of a dense model. 0: as ``flops_per_s``."""
    moe_training_flops_per_s: float = 0.0
    """FLOP/s per device in the training of a mixture of experts. 0: as ``flops_per_s``."""
    link_bytes_per_s: float = 0.0
    """Bytes/s between two devices of one machine, in one direction."""
    host_bytes_per_s: float = 0.0
    """Bytes/s between a device and the memory of its machine, in one direction."""
    network_bytes_per_s: float = 0.0
    """Bytes/s between devices of two machines, in one direction."""
    shm_bytes: int = 0
    """Bytes of ``/dev/shm`` of one machine. 0: unknown."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that determine its cost."""

    num_params: int
    """Number of parameters."""
    num_layers: int
    """Number of layers."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Dimension of one head."""
    bytes_per_value: float = 2.0
    """Bytes per value of weights and KV cache: 2 for bfloat16, 4 for float32."""
    num_active_params: int = 0
    """Active parameters per token in a mixture of experts. 0 means all."""
    num_experts: int = 0
    """Experts per layer. 0 if the model is not a mixture of experts."""
    experts_per_token: int = 0
    """Active experts per layer and token."""
    width: int = 0
    """Width of the residual stream."""
    num_outer_params: int = 0
    """Parameters outside the layers: embeddings and head."""
    vocab_size: int = 0
    """Tokens in the vocabulary. 0 if unknown."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.num_params * self.bytes_per_value

    @property
    def active_params(self) -> int:
        """Active parameters per token."""
        return self.num_active_params or self.num_params

    @property
    def expert_params(self) -> float:
        """Parameters of all experts of all layers.

        From ``total = shared + X`` and ``active = shared + X k / E``, with k of E experts per
        token.
        """
        if not self.num_experts:
            return 0.0
        idle = 1 - self.experts_per_token / self.num_experts
        return (self.num_params - self.active_params) / idle if idle else 0.0

    def touched_bytes(self, num_tokens: float) -> float:
        """Return the bytes of weights that a step of ``num_tokens`` tokens reads.

        In a mixture of experts, a token uses k of E experts. If each token draws them uniformly and
        independently, n tokens miss an expert with probability ``(1 - k / E)^n``. The step then
        reads ``E (1 - (1 - k / E)^n)`` experts of a layer. Real routers prefer some experts, so the
        step reads fewer.
        """
        if not self.num_experts:
            return self.weight_bytes
        idle = 1 - self.experts_per_token / self.num_experts
        left_out: float = idle ** max(1.0, num_tokens)
        return self.weight_bytes - self.expert_params * left_out * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values per token in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The hardware requirements of a run, in addition to its environments' workloads."""

    model: ModelShape | None = None
    """Shape of the model. None if unknown."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Env id -> relative share of the trajectories, on any scale. The default of a missing id is
    1."""
    max_concurrent: int = 256
    """Maximum number of concurrent episodes."""
    num_engines: int | None = None
    """Number of inference engines of the run. None means as many as fit."""
    engine_devices: int = 1
    """Devices per engine, all on one machine."""
    num_trainer_ranks: int = 1
    """Number of trainer ranks. Each uses one device."""
    recomputes: bool = False
    """Whether the trainer recomputes each layer in the backward pass (activation checkpointing)."""
    stateless_rewards: bool = False
    """Whether rewards may run on a serverless pool."""
    num_references: int = 0
    """Models of the policy's size that only compute logprobs, one forward pass each."""
    batch_trajectories: int = 0
    """Trajectories per batch. 0: unknown, so the limits of a batch are not estimated."""
    max_staleness: int = 1
    """Maximum staleness of a trained sample, in versions. 0: training and generation alternate."""
    longest: float = 1.0
    """The duration of the longest trajectory of a batch, relative to the mean."""
    colocates: bool = False
    """Whether trainer and engines use the same devices in turns. The other side's memory is free
    meanwhile."""
    num_trained_params: int = 0
    """Parameters that the trainer updates (adapters). 0: all."""
    shm_copies: int = 0
    """Versions of the weights that are kept in ``/dev/shm`` of a machine. 0: weights are sent from
    device to device."""
    host_copies: int = 0
    """Versions that the trainer copies to its host memory and sends from there meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionTime:
    """The estimated seconds per version of the weights. All parts move a bucket at a time."""

    gather_s: float
    """Gathering the shards of the trainer's ranks."""
    send_s: float
    """Sending weights to all machines with engines, or writing them to their ``/dev/shm``."""
    swap_s: float
    """Loading the weights into the engines' parameters."""
    trainer_s: float
    """The trainer publishes and cannot train: the longer of ``gather_s`` and ``send_s`` (or of the
    copy to host memory), and the first bucket of the other."""
    stall_s: float
    """Engines cannot generate: the swap, and also the transfer if it is from device to device."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected performance of a placement, by the model of :mod:`rollart_planner`."""

    trajectories_per_s: float
    """Trajectories per second, over all environments."""
    envs: Mapping[str, float]
    """Env id -> trajectories/s."""
    pools: Mapping[str, float]
    """Pool -> utilization of its devices from 0 to 1, including the trainer's devices."""
    turn_s: Mapping[str, Mapping[str, tuple[float, float]]]
    """Env id -> pool -> device seconds for one turn: prefill and decode."""
    bottleneck: str
    """The resource that limits the rate, as a sentence."""
    price_per_hour: float = 0.0
    """Price per hour of the devices in use."""
    version: VersionTime | None = None
    """Time of a new version of the weights. None if the size of a batch is unknown."""
    free_versions_per_s: float = 0.0
    """The rate if new versions took no time. 0 if it was not estimated."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The pool of each workload. All values are pool names."""

    envs: Mapping[str, str]
    """Env id -> pool of its env workers."""
    engines: Mapping[str, Mapping[str, float]]
    """Env id -> pool -> share of its trajectories that engines of the pool generate. The shares of
    an environment add up to 1."""
    trainer: str
    """Pool of the trainer."""
    rewards: str = "inline"
    """``inline``: rewards run in the same pool as the environments. Otherwise the name of a
    serverless pool."""
    reasons: tuple[str, ...] = field(default_factory=tuple)
    """Reasons for the placement, one sentence each."""
    num_engines: Mapping[str, int] = field(default_factory=dict)
    """Pool -> number of inference engines. If empty, the runtime decides."""
    expected: Expectation | None = None
    """Expected rates. None if the mapper does not compute them."""


class HardwareMapper(ABC):
    """Base class of hardware mappers."""

    demand: Demand = Demand()
    """Further requirements of the run. RollArt sets it before ``place``. A mapper may ignore it."""

    @abstractmethod
    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Map each environment's workload to pools.

        Args:
            workloads: Env id -> workload, declared or measured.
            pools: The available pools.

        Raises:
            ValueError: If the pools cannot run the workloads. The message names the workload and
                the reason.
        """
