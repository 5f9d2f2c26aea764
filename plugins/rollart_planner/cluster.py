"""The cluster file: pools of identical devices, from YAML to :class:`Pool` records.

    pools:
      - {name: train, device: H100, count: 4, roles: [trainer]}
      - {name: decode, device: H20, count: 8, price_per_hour: 1.2}
      - {name: cpus, device: cpu, count: 192}
    efficiency: {compute: 0.5, bandwidth: 0.7}

Takes: a path, or a mapping. Gives: checked pools. The figures of known devices are filled in, and
the efficiency is applied. Never: queries a cluster; it only reads the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, field_validator

from rollart_core.config.base import Figure, NonNegative, Positive, PositiveInt, Section
from rollart_core.config.load import read_yaml
from rollart_core.config.model import Shape
from rollart_core.config.problems import Problem, of_validation
from rollart_core.contracts.hardware import ModelShape, Pool, Role
from rollart_core.errors import ConfigError, did_you_mean
from rollart_planner.devices import (
    ALIASES,
    DEVICES,
    GB,
    NETWORK_BYTES_PER_S,
    SERVERLESS,
    Device,
    find_device,
)


class DeviceFigures(Section):
    """The figures of one device. In a pool, they override the figures of the table."""

    flops_per_s: Figure | None = None
    """Dense FLOP/s in the model's number format."""
    bytes_per_s: Figure | None = None
    """Memory bandwidth in bytes/s."""
    memory_gb: Figure | None = None
    """Memory in 10^9 bytes."""
    price_per_hour: NonNegative | None = None
    """Price of one device per hour."""


class PoolSection(DeviceFigures):
    """A set of identical devices."""

    name: Annotated[str, Field(min_length=1)]
    """The name that placements use."""
    device: Annotated[str, Field(min_length=1)]
    """``cpu`` (counted in cores), ``serverless`` (counted in concurrent calls), or an accelerator
    such as ``H100``."""
    count: PositiveInt
    """The number of devices."""
    resources: dict[str, Positive] = Field(default_factory=dict)
    """The resources of one device in the cluster's own scheduler, such as ``{GPU: 1}`` in Ray."""
    roles: tuple[Role, ...] = ()
    """What the pool may be used for. If empty, everything that its device supports."""
    per_node: PositiveInt | None = None
    """Devices per machine. If not set, all devices of the pool are in one machine."""
    host_memory_gb: Figure | None = None
    """Host memory of one machine in 10^9 bytes. If not set, it is assumed to be sufficient."""
    shm_gb: Figure | None = None
    """Size of ``/dev/shm`` of one machine in 10^9 bytes. Default: half of ``host_memory_gb``, which
    is the default of tmpfs."""
    network_bytes_per_s: Figure | None = None
    """Bytes/s between machines for each device, in one direction. Default: the share ``bandwidth``
    of 25e9 (200 Gb/s)."""


class Efficiency(Section):
    """The share of the data sheet's peaks that is reached.

    Engines: fitted to vLLM's rates of Qwen3-8B on one H100, five workloads, all within 17%
    (https://github.com/tgarg01/silybench-data, run 20260924T125045Z; all checked in tests).

    Training: between the published figures of RL on H100 and those of pre-training. Dense models
    reach 32% to 37% (torchtitan, NeMo-RL); mixtures of experts 11% to 17% with rows of up to 16k
    tokens (NeMo-RL, prime-rl), and 16% to 28% with long or full rows (prime-rl, Megatron Bridge,
    NeMo AutoModel). The table with its sources is in docs/explanation/planning.md.
    """

    compute: Annotated[float, Field(gt=0, le=1)] = 0.6
    """The share of the peak FLOP/s that an engine reaches."""
    bandwidth: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The share of the peak bytes/s of memory, links and network."""
    training: Annotated[float, Field(gt=0, le=1)] = 0.35
    """The share of the peak FLOP/s in the training of a dense model (MFU)."""
    moe_training: Annotated[float, Field(gt=0, le=1)] = 0.12
    """The share of the peak FLOP/s in the training of a mixture of experts (MFU)."""
    step_s: NonNegative = 0.001
    """Fixed overhead of one engine step in seconds: scheduling, kernel launches, sampling."""


class ModelSection(Shape):
    """The shape of the model, if neither the config nor this machine has it."""

    bytes_per_value: Figure = 2.0
    """Bytes per value of weights and KV cache."""

    def shape(self) -> ModelShape:
        """Return it in the planner's form."""
        return ModelShape(**self.model_dump())


class Cluster(Section):
    """A whole cluster file."""

    pools: tuple[PoolSection, ...]
    """The available pools."""
    devices: dict[str, DeviceFigures] = Field(default_factory=dict)
    """Devices that the table does not have, or that have other figures."""
    efficiency: Efficiency = Efficiency()
    """The share of the figures that is reached. The figures set on a pool are used in full."""
    model: ModelSection | None = None
    """If not set, it is read from the config's model."""

    @field_validator("pools")
    @classmethod
    def _one_at_least(cls, value: tuple[PoolSection, ...]) -> tuple[PoolSection, ...]:
        if not value:
            raise ValueError("a cluster needs a pool: {name: gpus, device: H100, count: 8}")
        return value

    def to_pools(self) -> list[Pool]:
        """Return the pools with their figures, in the order of the file.

        Raises:
            ConfigError: If a device is unknown.
        """
        problems = list(_problems(self))
        if problems:
            raise ConfigError("\n".join(problem.within() for problem in problems))
        return [self._pool(section) for section in self.pools]

    def _pool(self, section: PoolSection) -> Pool:
        known = find_device(section.device) or Device(0.0, 0.0, 0, 0.0)
        device = _replaced(known, self._own(section.device))
        share = self.efficiency
        host_bytes = int((section.host_memory_gb or 0) * GB)
        return Pool(
            name=section.name,
            device=section.device,
            count=section.count,
            flops_per_s=section.flops_per_s or device.flops_per_s * share.compute,
            bytes_per_s=section.bytes_per_s or device.bytes_per_s * share.bandwidth,
            memory_bytes=int((section.memory_gb or 0) * GB) or device.memory_bytes,
            price_per_hour=device.price_per_hour
            if section.price_per_hour is None
            else section.price_per_hour,
            resources=dict(section.resources),
            roles=section.roles,
            step_s=share.step_s,
            per_node=section.per_node or 0,
            host_memory_bytes=host_bytes,
            training_flops_per_s=section.flops_per_s or device.flops_per_s * share.training,
            moe_training_flops_per_s=section.flops_per_s or device.flops_per_s * share.moe_training,
            link_bytes_per_s=device.link_bytes_per_s * share.bandwidth,
            host_bytes_per_s=device.host_bytes_per_s * share.bandwidth,
            network_bytes_per_s=section.network_bytes_per_s
            or NETWORK_BYTES_PER_S * share.bandwidth,
            shm_bytes=int((section.shm_gb or 0) * GB) or host_bytes // 2,
        )

    def _own(self, name: str) -> DeviceFigures:
        return next(
            (f for key, f in self.devices.items() if key.lower() == name.lower()), DeviceFigures()
        )


def load_cluster(path: str | Path) -> Cluster:
    """Read and check a cluster file.

    Raises:
        ConfigError: One line per problem: ``file:line: key: the problem and the fix``.
    """
    source = Path(path)
    mapping = read_yaml(source)
    if "pools" not in mapping and mapping.keys() & {"env", "stop"}:
        raise ConfigError(
            f"{source}: looks like a run config, not a cluster file, which has `pools`; see "
            "examples/clusters"
        )
    try:
        cluster = Cluster.model_validate(mapping)
    except ValidationError as e:
        problems = of_validation(e, Cluster)
    else:
        problems = list(_problems(cluster))
        if not problems:
            return cluster
    raise ConfigError("\n".join(f"{source}{_line(source, p.path)}: {p.within()}" for p in problems))


def _problems(cluster: Cluster) -> list[Problem]:
    """Return contradictions between keys, and devices that are unknown."""
    problems, seen = [], set()
    for i, pool in enumerate(cluster.pools):
        if pool.name in seen:
            again = f"{pool.name!r} is already the name of an earlier pool: use a unique name"
            problems.append(Problem(("pools", i, "name"), again))
        seen.add(pool.name)
        if (missing := _missing(cluster, pool)) is not None:
            problems.append(Problem(("pools", i, "device"), missing))
    used = {pool.device.lower() for pool in cluster.pools}
    for name in cluster.devices:
        if name.lower() not in used:
            problems.append(Problem(("devices", name), "has no effect: no pool has this device"))
    return problems


def _missing(cluster: Cluster, pool: PoolSection) -> str | None:
    own = cluster._own(pool.device)
    both = (own.flops_per_s or pool.flops_per_s, own.bytes_per_s or pool.bytes_per_s)
    if pool.device.lower() == SERVERLESS or find_device(pool.device) or all(both):
        return None
    near = did_you_mean(pool.device, [*DEVICES, *ALIASES])
    return (
        f"unknown device {pool.device!r}.{near} Known: {', '.join(DEVICES)}; or set its "
        "flops_per_s and bytes_per_s here"
    )


def _replaced(device: Device, own: DeviceFigures) -> Device:
    return Device(
        own.flops_per_s or device.flops_per_s,
        own.bytes_per_s or device.bytes_per_s,
        int((own.memory_gb or 0) * GB) or device.memory_bytes,
        device.price_per_hour if own.price_per_hour is None else own.price_per_hour,
        device.link_bytes_per_s,
        device.host_bytes_per_s,
    )


def _line(source: Path, path: tuple[str | int, ...]) -> str:
    """Return ``:line`` of a key in the file, or of its nearest parent section."""
    node: Any = yaml.compose(source.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    mark = node.start_mark
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(part)]
            if not found:
                break
            mark, node = found[0][0].start_mark, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            mark = node.start_mark
        else:
            break
    return f":{mark.line + 1}"


def filled(pools: Sequence[Pool]) -> list[Pool]:
    """Return pools that use the table's figures unless they set their own.

    Raises:
        ValueError: If a pool's device is unknown and has no figures.
    """
    return [_filled(pool) for pool in pools]


def _filled(pool: Pool) -> Pool:
    if (pool.flops_per_s and pool.bytes_per_s) or pool.device.lower() == SERVERLESS:
        return pool
    device = find_device(pool.device)
    if device is None:
        raise ValueError(
            f"pool {pool.name}: unknown device {pool.device!r}; "
            "set its flops_per_s and bytes_per_s, or use a mapper that does not need them "
            "(colocate, static). Known: " + ", ".join(DEVICES)
        )
    share = Efficiency()
    return replace(
        pool,
        flops_per_s=pool.flops_per_s or device.flops_per_s * share.compute,
        bytes_per_s=pool.bytes_per_s or device.bytes_per_s * share.bandwidth,
        memory_bytes=pool.memory_bytes or device.memory_bytes,
        price_per_hour=pool.price_per_hour or device.price_per_hour,
        step_s=pool.step_s or share.step_s,
        training_flops_per_s=pool.training_flops_per_s
        or pool.flops_per_s
        or device.flops_per_s * share.training,
        moe_training_flops_per_s=pool.moe_training_flops_per_s
        or pool.flops_per_s
        or device.flops_per_s * share.moe_training,
        link_bytes_per_s=pool.link_bytes_per_s or device.link_bytes_per_s * share.bandwidth,
        host_bytes_per_s=pool.host_bytes_per_s or device.host_bytes_per_s * share.bandwidth,
        network_bytes_per_s=pool.network_bytes_per_s or NETWORK_BYTES_PER_S * share.bandwidth,
    )
