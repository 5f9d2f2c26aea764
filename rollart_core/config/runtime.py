"""Sections of a run config for the runtime: where workers run, and how many of them.

Takes: plain mappings. Gives: frozen sections, which :mod:`rollart_core.config.run` uses. Never:
queries the resources of a machine or a cluster.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rollart_core.config.base import (
    Fraction,
    Name,
    NonNegative,
    Positive,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Threads,
)


class InlineRuntime(Section):
    """One machine: one process per engine and trainer rank, environments in ``env_processes``."""

    case: ClassVar[str] = "runtime.kind: inline"

    kind: Literal["inline"] = "inline"
    """Selects one machine."""
    num_engines: Processes = 1
    """Number of inference engines, each in its own process."""
    num_trainer_ranks: Processes = 1
    """Number of trainer processes that share parameters and work. On CUDA each uses one device."""
    colocate: bool = False
    """Whether trainer and engines use the same devices in turns. While one of them works, the other
    frees its memory. Requires ``mode: sync``, and one trainer rank for each device of the
    engines."""
    env_processes: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Number of processes for environments. 0 runs environments in threads of the controller's
    process. Increase it for CPU-heavy environments."""
    env_threads: Annotated[int, Field(gt=0, le=65536)] = 64
    """Maximum number of concurrent environment calls in one env process."""
    engine_threads: Threads = 1
    """Number of CPU threads that torch uses in each inference engine."""
    trainer_threads: Threads = 1
    """Number of CPU threads that torch uses in each trainer rank."""


class RayPool(Section):
    """A set of identical devices of a Ray cluster, with the keys of a cluster file's pool."""

    name: Name
    """Name of the pool in placements."""
    device: Name = "cpu"
    """Type of device: ``cpu`` (counted in cores), or an accelerator such as ``H100``."""
    count: PositiveInt
    """Number of devices. An engine or trainer rank uses one."""
    resources: dict[str, Positive] = Field(default_factory=dict)
    """Ray resources of one device, such as ``{GPU: 1}`` or ``{big_node: 1}``. Default: ``{CPU: 1}``
    if the device is ``cpu``, otherwise ``{GPU: 1}``."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pool's nodes, such as ``{ray.io/accelerator-type: H100}``."""
    roles: tuple[Literal["envs", "engines", "trainer"], ...] = ()
    """Allowed uses of the pool. If not set, every use that fits its device is allowed."""
    flops_per_s: Annotated[float, Field(ge=0, le=1e24)] = 0.0
    """Operations per second of one device. If 0, the table of devices is used."""
    bytes_per_s: Annotated[float, Field(ge=0, le=1e24)] = 0.0
    """Memory bandwidth of one device in bytes per second. If 0, the table of devices is used."""
    price_per_hour: NonNegative = 0.0
    """Price per hour of one device. If 0, the table of devices is used."""


class RayRuntime(Section):
    """A Ray cluster: each worker is an actor on the pool that the hardware mapper selected."""

    case: ClassVar[str] = "runtime.kind: ray"

    kind: Literal["ray"] = "ray"
    """Selects a Ray cluster."""
    address: str | None = None
    """``auto`` joins the cluster that this machine belongs to, and ``host:port`` another one. If
    not set, the run starts its own cluster on this machine."""
    pools: tuple[RayPool, ...] = ()
    """Pools of the cluster. If not set, they are detected."""
    num_engines: Processes = 1
    """Number of inference engines, distributed over the pools by the shares of the placement."""
    num_trainer_ranks: Processes = 1
    """Number of trainer actors that share parameters and work. On CUDA each uses one device."""
    num_env_workers: Processes = 1
    """Number of processes for environments, spread over the nodes of their pool."""
    env_threads: Annotated[int, Field(gt=0, le=65536)] = 64
    """Maximum number of concurrent environment calls in one env worker."""
    engine_threads: Threads = 1
    """Number of CPU threads that torch uses in each inference engine."""
    trainer_threads: Threads = 1
    """Number of CPU threads that torch uses in each trainer rank."""
    placement_s: Seconds = 60.0
    """Maximum seconds to wait until the cluster has capacity for all workers."""
    head_lost_s: Annotated[float, Field(gt=0, le=50)] = 15.0
    """Seconds that the cluster's head may be unreachable. After that the run stops and keeps its
    results."""
    env_vars: tuple[str, ...] = ()
    """Names of environment variables that the run passes to all its workers, such as
    ``[HF_TOKEN]``. Their values are those of the process that starts the run. They are written to
    no file."""
    health_check_s: Seconds | None = None
    """Seconds between Ray's health checks of a node, in a cluster that this run starts. A node that
    misses three checks is dead. If not set, Ray's own settings apply (about 16 s until a node is
    dead)."""

    @field_validator("env_vars")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in value):
            raise ValueError("list the names of variables only, such as [HF_TOKEN], without values")
        return value

    @field_validator("address")
    @classmethod
    def _no_ray_client(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                "a run is a driver of the cluster, so it cannot use Ray Client (ray://): start it "
                "on a machine of the cluster with address: auto, or give the head's host:port"
            )
        return value


def _which_runtime(value: object) -> str:
    """Return the class name for a ``runtime`` section."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "RayRuntime" if kind == "ray" else "InlineRuntime"


Runtime = Annotated[
    Annotated[InlineRuntime, Tag("InlineRuntime")] | Annotated[RayRuntime, Tag("RayRuntime")],
    Discriminator(_which_runtime),
]


class EngineScaling(Section):
    """When inference engines are added and removed automatically."""

    min: Processes = 1
    """Minimum number of engines."""
    max: Processes
    """Maximum number of engines."""
    kv_above: Fraction = 0.9
    """Add an engine if the mean KV cache usage of the engines is at least this share."""
    waiting_above: Positive = 8.0
    """Add an engine if the mean number of waiting requests per engine is at least this."""
    kv_below: Fraction = 0.4
    """Remove an engine if the mean KV cache usage is at most this share and no request waits."""

    @model_validator(mode="after")
    def _ordered(self) -> EngineScaling:
        _check_order(self, ("min", "max"), ("kv_below", "kv_above"))
        return self


class EnvScaling(Section):
    """When env workers are added and removed automatically."""

    min: Processes = 1
    """Minimum number of env workers."""
    max: Processes
    """Maximum number of env workers."""
    episodes_above: Positive = 64.0
    """Add an env worker if the mean number of episodes per worker is at least this."""
    episodes_below: NonNegative = 16.0
    """Remove an env worker if the mean number of episodes per worker is at most this."""

    @model_validator(mode="after")
    def _ordered(self) -> EnvScaling:
        _check_order(self, ("min", "max"), ("episodes_below", "episodes_above"))
        return self


class Scaling(Section):
    """When workers of a running job are added and removed automatically."""

    engines: EngineScaling | None = None
    """Scaling of inference engines. If not set, their number does not change."""
    env_workers: EnvScaling | None = None
    """Scaling of env workers. If not set, their number does not change."""
    look_s: Seconds = 5.0
    """Seconds between two checks of the limits."""
    hold_s: Seconds = 30.0
    """Seconds that a limit must be exceeded before the number changes."""
    cool_s: Seconds = 60.0
    """Seconds after a change before the next one."""

    @model_validator(mode="after")
    def _one_at_least(self) -> Scaling:
        if self.engines is None and self.env_workers is None:
            raise ValueError("scaling needs engines or env_workers, each with its max")
        return self


def _check_order(section: Section, *pairs: tuple[str, str]) -> None:
    """Raise ValueError unless each first key is at most the second (limits: below it)."""
    for low, high in pairs:
        less, more = getattr(section, low), getattr(section, high)
        if less > more or (less == more and low != "min"):
            raise ValueError(
                f"{low} ({less:g}) must be {'at most' if low == 'min' else 'below'} "
                f"{high} ({more:g})"
            )
