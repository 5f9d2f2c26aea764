"""Sections of a run config that say where its parts run, and how many of them.

Takes: plain mappings. Gives: frozen sections, of which :mod:`rollart_core.config.run` makes a run
config. Never: asks what a machine or a cluster has.
"""

from __future__ import annotations

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
    """One machine: engines and trainer in a process each, environments in ``env_processes``."""

    case: ClassVar[str] = "runtime.kind: inline"

    kind: Literal["inline"] = "inline"
    """The runtime."""
    num_engines: Processes = 1
    """Inference engines, in a process each."""
    num_trainer_ranks: Processes = 1
    """Processes the trainer's parameters and work are shared over; on CUDA each takes a device."""
    env_processes: Annotated[int, Field(ge=0, le=10_000)] = 1
    """0 runs environments in threads of the controller's process."""
    env_threads: Annotated[int, Field(gt=0, le=65536)] = 64
    """Most env calls at once in one env process."""
    engine_threads: Threads = 1
    """CPU threads torch uses in the inference engine."""
    trainer_threads: Threads = 1
    """CPU threads torch uses in each trainer rank."""


class RayPool(Section):
    """A set of like devices of a Ray cluster; the keys are those of a cluster file's pools."""

    name: Name
    """What placements call it."""
    device: Name = "cpu"
    """``cpu`` (counted in cores), or an accelerator such as ``H100``."""
    count: PositiveInt
    """How many devices: a part that computes takes one."""
    resources: dict[str, Positive] = Field(default_factory=dict)
    """What Ray calls one device, such as ``{GPU: 1}`` or ``{big_node: 1}``; none: ``{CPU: 1}``, or
    ``{GPU: 1}`` where the device is not ``cpu``."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of its nodes, such as ``{ray.io/accelerator-type: H100}``."""
    roles: tuple[Literal["envs", "engines", "trainer"], ...] = ()
    """What it may be used for; none: whatever fits its device."""
    flops_per_s: Annotated[float, Field(ge=0, le=1e24)] = 0.0
    """Of one device; 0: as the table of devices says."""
    bytes_per_s: Annotated[float, Field(ge=0, le=1e24)] = 0.0
    """Memory bandwidth of one device; 0: as the table says."""
    price_per_hour: NonNegative = 0.0
    """Of one device; 0: as the table says."""


class RayRuntime(Section):
    """A Ray cluster: each part is an actor, on the pool that the hardware mapper chose for it."""

    case: ClassVar[str] = "runtime.kind: ray"

    kind: Literal["ray"] = "ray"
    """The runtime."""
    address: str | None = None
    """``auto`` joins the cluster this machine belongs to, ``host:port`` another; none starts one on
    this machine, for this run alone."""
    pools: tuple[RayPool, ...] = ()
    """What there is; none: found out from the cluster."""
    num_engines: Processes = 1
    """Inference engines, over the pools by the shares of the placement."""
    num_trainer_ranks: Processes = 1
    """Actors the trainer's parameters and work are shared over; on CUDA each takes a device."""
    num_env_workers: Processes = 1
    """Processes that hold environments, spread over the nodes of their pool."""
    env_threads: Annotated[int, Field(gt=0, le=65536)] = 64
    """Most env calls at once in one env worker."""
    engine_threads: Threads = 1
    """CPU threads torch uses in an inference engine."""
    trainer_threads: Threads = 1
    """CPU threads torch uses in a trainer rank."""
    placement_s: Seconds = 60.0
    """How long to wait until the cluster has room for all parts."""
    head_lost_s: Annotated[float, Field(gt=0, le=50)] = 15.0
    """When the cluster's head is out of reach for this long, the run stops and keeps what is
    done."""
    health_check_s: Seconds | None = None
    """Of a cluster this run starts: how often Ray looks whether a node lives. One that misses three
    looks is dead; none: Ray's own settings, by which it takes about 16 s."""

    @field_validator("address")
    @classmethod
    def _no_ray_client(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                "a run is a driver of the cluster, which Ray Client (ray://) cannot be: start it "
                "on a machine of the cluster with address: auto, or name the head's host:port"
            )
        return value


def _which_runtime(value: object) -> str:
    """Return the class of a ``runtime`` section."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "RayRuntime" if kind == "ray" else "InlineRuntime"


Runtime = Annotated[
    Annotated[InlineRuntime, Tag("InlineRuntime")] | Annotated[RayRuntime, Tag("RayRuntime")],
    Discriminator(_which_runtime),
]


class EngineScaling(Section):
    """When inference engines join and leave by themselves."""

    min: Processes = 1
    """Never fewer."""
    max: Processes
    """Never more."""
    kv_above: Fraction = 0.9
    """One more, when the engines' KV caches are fuller than this on average..."""
    waiting_above: Positive = 8.0
    """...or as many requests wait in each, on average."""
    kv_below: Fraction = 0.4
    """One fewer, when they are emptier than this and no request waits."""

    @model_validator(mode="after")
    def _ordered(self) -> EngineScaling:
        _check_order(self, ("min", "max"), ("kv_below", "kv_above"))
        return self


class EnvScaling(Section):
    """When env workers join and leave by themselves."""

    min: Processes = 1
    """Never fewer."""
    max: Processes
    """Never more."""
    episodes_above: Positive = 64.0
    """One more, when each holds as many episodes as this, on average."""
    episodes_below: NonNegative = 16.0
    """One fewer, when each holds no more than this."""

    @model_validator(mode="after")
    def _ordered(self) -> EnvScaling:
        _check_order(self, ("min", "max"), ("episodes_below", "episodes_above"))
        return self


class Scaling(Section):
    """When parts join and leave a running job by themselves (by hand: `rollart scale`)."""

    engines: EngineScaling | None = None
    """None: their number stays."""
    env_workers: EnvScaling | None = None
    """None: their number stays."""
    look_s: Seconds = 5.0
    """Seconds between two looks."""
    hold_s: Seconds = 30.0
    """How long a limit must be passed before anything changes."""
    cool_s: Seconds = 60.0
    """How long nothing changes after a change."""

    @model_validator(mode="after")
    def _one_at_least(self) -> Scaling:
        if self.engines is None and self.env_workers is None:
            raise ValueError("scaling needs engines or env_workers, each with its max")
        return self


def _check_order(section: Section, *pairs: tuple[str, str]) -> None:
    """Raise ValueError unless the first of each pair is at most the second (limits: below it)."""
    for low, high in pairs:
        less, more = getattr(section, low), getattr(section, high)
        if less > more or (less == more and low != "min"):
            raise ValueError(
                f"{low} ({less:g}) must be {'at most' if low == 'min' else 'below'} "
                f"{high} ({more:g})"
            )
