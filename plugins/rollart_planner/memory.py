"""Estimate whether a trainer rank, an engine and a machine fit in memory, and suggest fixes.

    a trainer rank of N, in bytes (P parameters, of which O are outside of L layers; b bytes per
    value where layers are computed)
        weights 4 P / N, gradients 4 P / N, Adam's moments 8 P / N       all of them float32; there
        is no other master copy (ZeRO, arXiv 1910.02054, section 3.1, stage 3); with trainer.max_kl
        a copy of weights and moments, 12 P / N
        gathered  2 b O + max(3 b l + 4 l, 4 O), l = (P - O) / L: FSDP2 keeps the outermost group
        and its whole gradient, and of the layers the current one, the next one, and the gradient of
        one, which is summed over ranks in float32
        activations  T (b L h + layer) with activation checkpointing, else T L layer; T tokens of a
        microbatch; layer is, per token of one layer, b (4 h + 3 q + 3 k + 4 f) for products,
        attention and gate, and 4 (2 h + q + k) for norms, which are in float32; h is the width, q
        and k all query and key heads, f the inner width (counted as in arXiv 2205.05198, section
        4.1, without dropout, and without scores, which fused attention does not keep)
        logits  (b + 16) V min(T, C), C = 2^28 / 4 V positions of a chunk: the logits, and in
        float32 the logits, their logarithms, their probabilities, and the products of both; if
        T > C the gradient of the head too, 4 V h, which is summed over chunks. Every token of the
        microbatch may be sampled
        with ``runtime.colocate`` what the sleeping engine keeps; with LoRA of A parameters in
        place of gradients and moments 4 A / N and 8 A / N
    the host memory of a machine whose ranks have devices, with ``runtime.colocate`` a copy of
    weights and moments (and so of the reference), with ``weights: collective`` W for each version
    that is kept there, and the larger of
        loading  4 P for a single rank; several ranks each read their shards row by row: at most
        their rows of the largest tensor, the embedding, 4 V h / N
        exporting  b P, on the machine of rank 0
    /dev/shm of each machine with engines (see :mod:`rollart_planner.publication`)
        W for each version that is kept there; none if weights go from device to device
    an engine over t devices
        weights W / t, and K / t for each token in the cache (see :mod:`rollart_planner.roofline`);
        with ``runtime.colocate`` what the offloaded trainer keeps

Takes: a model's shape, numbers of a run, pools; or a resolved run, with the placement of its
mapper. Gives: bytes by purpose, and a verdict for each kind of worker and pool. Never: measures
anything. These are estimates: allocators fragment, and kernels need workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Demand, ModelShape, Placement, Pool
from rollart_core.runtime.workload import held_tokens
from rollart_planner.cluster import filled
from rollart_planner.devices import GB
from rollart_planner.fit import is_cpu
from rollart_planner.publication import shm_bytes
from rollart_planner.roofline import KV_SHARE, engine_model

ASLEEP_BYTES = 3 * GB
"""An assumption, not measured: what a sleeping engine keeps on each device (CUDA context, captured
graphs, NCCL, workspaces)."""
OFFLOADED_BYTES = 1 * GB
"""An assumption, not measured: what an offloaded trainer rank keeps (CUDA context, workspaces)."""
TRAIN_SHARE = 0.9
"""Share of a device's memory that a rank may use; the rest is for CUDA, NCCL and fragmentation."""
CHUNK_BYTES = 2**28
"""The same as ``CHUNK_BYTES`` of ``rollart_core.training.head``, without torch."""
WHOLE_GRADIENT_BYTES = 2 * 2**30
"""The same as ``WHOLE_GRADIENT_BYTES`` of ``rollart_core.training.distributed``, without torch."""
MOST_RANKS = 4096
"""The largest number of ranks that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNumbers:
    """The numbers of a run that determine what a trainer rank holds."""

    num_ranks: int
    num_tokens: int
    """Tokens of the largest microbatch."""
    recomputes: bool = False
    """Whether layers are recomputed in the backward pass."""
    bytes_per_value: float = 2.0
    """Bytes per value in the computation of layers."""
    num_references: int = 0
    """Models of the policy's size that are not trained, such as the reference model."""
    num_critics: int = 0
    """Additional models of the policy's size that are trained."""
    num_trained_params: int = 0
    """Parameters of adapters, if only they are trained. 0: all parameters are trained."""
    colocates: bool = False
    """Whether an engine sleeps on each device meanwhile."""
    bounds_steps: bool = False
    """Whether parameters and moments are copied before each step (``trainer.max_kl``)."""


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Whether one kind of worker fits where it is placed."""

    part: str
    """``trainer rank``, ``engine``, ``machine`` or ``/dev/shm``."""
    pool: str
    count: int
    """The number of them."""
    needed: Mapping[str, float]
    """Purpose -> bytes per device (for ``machine`` and ``/dev/shm``: per machine)."""
    have_bytes: float
    """Available bytes; 0 if unknown."""
    says: str = ""
    """How to fix it if it does not fit, or what a tight fit costs."""
    fits: bool = True

    @property
    def needed_bytes(self) -> float:
        """The sum of all purposes."""
        return sum(self.needed.values())


def rank_bytes(model: ModelShape, run: TrainingNumbers) -> dict[str, float]:
    """Return the peak memory of a trainer rank by purpose; see the module docstring."""
    shard = model.num_params / run.num_ranks
    adapters = run.num_trained_params / run.num_ranks
    policy, trained = (shard + adapters, adapters) if adapters else (shard, shard)
    found = {
        "weights": 4 * (policy + shard * run.num_critics),
        "gradients": 4 * (trained + shard * run.num_critics),
        "Adam's moments": 8 * (trained + shard * run.num_critics),
        "copy before a step": 12 * trained * run.bounds_steps,
        "reference": 4 * trained * run.num_references,
        "gathered": _gathered(model, run),
        "activations": _activations(model, run),
        "logits": _logits(model, run),
        "sleeping engine": ASLEEP_BYTES * run.colocates,
    }
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def _logits(model: ModelShape, run: TrainingNumbers) -> float:
    chunk = CHUNK_BYTES / max(1, 4 * model.vocab_size)
    width = model.width or model.num_heads * model.head_dim
    gradient = 4.0 * model.vocab_size * width if run.num_tokens > chunk else 0.0
    rows = min(run.num_tokens, chunk)
    return rows * model.vocab_size * (run.bytes_per_value + 16) + gradient


def _gathered(model: ModelShape, run: TrainingNumbers) -> float:
    b, outer = run.bytes_per_value, model.num_outer_params
    if run.num_ranks == 1:  # not sharded; autocast keeps a copy of the cast weights
        return b * model.num_params if b < 4 else 0.0
    whole = 4.0 * model.num_params
    layer = (model.num_params - outer) / model.num_layers
    passing = 2 * b * outer + max(3 * b * layer + 4 * layer, 4.0 * outer)
    return passing + (whole if whole <= WHOLE_GRADIENT_BYTES else 0.0)


def _activations(model: ModelShape, run: TrainingNumbers) -> float:
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    width = model.width or queries
    active = (model.active_params - model.num_outer_params) / model.num_layers
    inner = max(0.0, active - width * (2 * queries + 2 * keys)) / (3 * width)
    copies = model.experts_per_token * 2 * width  # rows are sent to each expert and back
    b = run.bytes_per_value
    layer = b * (4 * width + 3 * queries + 3 * keys + 4 * inner + copies)
    layer += 4 * (2 * width + queries + keys)
    each = b * model.num_layers * width + layer if run.recomputes else model.num_layers * layer
    return run.num_tokens * each


def trainer_verdict(model: ModelShape, pool: Pool, run: TrainingNumbers) -> MemoryVerdict:
    """Return whether the trainer's ranks fit the devices of a pool."""
    needed, have = rank_bytes(model, run), TRAIN_SHARE * pool.memory_bytes
    total = sum(needed.values())
    if not have or total <= have:
        return MemoryVerdict("trainer rank", pool.name, run.num_ranks, needed, have)

    def fits(**changes: int | bool) -> bool:
        return sum(rank_bytes(model, _changed(run, changes)).values()) <= have

    ways = []
    if ranks := _least(lambda n: fits(num_ranks=n), run.num_ranks):
        ways.append(f"set runtime.num_trainer_ranks to {ranks} or more")
    if not run.recomputes and fits(recomputes=True):
        ways.append("set trainer.activation_checkpointing to true")
    if half := _halved(lambda n: fits(num_tokens=n), run.num_tokens):
        ways.append(
            f"set trainer.max_tokens_per_microbatch and rollout.max_context_tokens to {half}"
        )
    ways.append("use devices with more memory")
    says = (
        f"the trainer's {run.num_ranks} rank(s) need {total / GB:.1f} GB each, but a rank can use "
        f"{have / GB:.1f} GB of a device of {pool.name}: {', or '.join(ways)}"
    )
    return MemoryVerdict("trainer rank", pool.name, run.num_ranks, needed, have, says, fits=False)


def engine_verdict(
    model: ModelShape,
    pool: Pool,
    *,
    num_engines: int,
    devices: int,
    rows: Mapping[str, tuple[float, Workload]],
    longest: int,
    others_bytes: float = 0.0,
) -> MemoryVerdict:
    """Return whether engines fit, and whether the episodes that they hold concurrently fit.

    Args:
        model: The model.
        pool: The pool of the engines.
        num_engines: The number of engines.
        devices: Devices per engine.
        rows: Env -> concurrent episodes on all of these engines, and the workload of each.
        longest: Tokens of the longest row that the run allows.
        others_bytes: Bytes of each device that an offloaded trainer keeps.
    """
    split = engine_model(model, devices)
    per_token = split.kv_bytes_per_token / devices
    weights, have = model.weight_bytes / devices, KV_SHARE * pool.memory_bytes
    tokens = sum(num * held_tokens(load) for num, load in rows.values()) / max(1, num_engines)
    needed = {"weights": weights, "KV cache": tokens * per_token}
    if others_bytes:
        needed["offloaded trainer"] = others_bytes
    verdict = MemoryVerdict("engine", pool.name, num_engines, needed, have)
    if not have or verdict.needed_bytes <= have:
        return verdict
    free_bytes = have - weights - others_bytes
    if free_bytes < longest * per_token:
        least = _least(lambda n: _holds(model, have - others_bytes, n, longest), devices)
        ways = [f"use {least} devices per engine (engine.tp_size)"] if least else []
        ways += ["lower rollout.max_context_tokens"] if free_bytes > 0 else []
        ways.append("use devices with more memory")
        says = (
            f"an engine over {devices} device(s) needs {weights / GB:.1f} GB of weights each and "
            f"{longest * per_token / GB:.1f} GB of its longest row, but can use "
            f"{(have - others_bytes) / GB:.1f} GB of a device of {pool.name}: {', or '.join(ways)}"
        )
        return MemoryVerdict("engine", pool.name, num_engines, needed, have, says, fits=False)
    says = (
        f"an engine on {pool.name} has memory for {free_bytes / (tokens * per_token):.0%} of its "
        "concurrent rows: the others wait, or are recomputed. Use more engines, more "
        "devices per engine, or lower rollout.max_concurrent"
    )
    return MemoryVerdict("engine", pool.name, num_engines, needed, have, says)


def machine_verdict(
    model: ModelShape,
    pool: Pool,
    num_ranks: int,
    *,
    on_host: bool = False,
    offloaded_bytes: float = 0.0,
    num_versions: int = 0,
) -> MemoryVerdict | None:
    """Return whether a machine's host memory holds the data of its ranks; None if unknown.

    Args:
        model: The model.
        pool: The pool of the ranks.
        num_ranks: The number of ranks.
        on_host: Whether ranks also keep their shards there, because their devices have no memory.
        offloaded_bytes: Bytes of each rank's host copies (``runtime.colocate``).
        num_versions: Versions of the weights that the trainer keeps there.
    """
    if not pool.host_memory_bytes:
        return None
    there = min(num_ranks, pool.per_node or pool.count)
    needed, have = _host_bytes(model, num_ranks, there, on_host), float(pool.host_memory_bytes)
    if offloaded_bytes:
        needed["offloaded trainer"] = there * offloaded_bytes
    if num_versions:
        needed["published versions"] = float(num_versions * model.weight_bytes)
    count, total = -(-num_ranks // there), sum(needed.values())
    if total <= have:
        return MemoryVerdict("machine", pool.name, count, needed, have)
    ways = ["use machines with more memory"]
    if num_ranks == 1:
        ways.insert(0, "set runtime.num_trainer_ranks to 2 or more, so that no rank loads it whole")
    if "exporting" in needed and model.bytes_per_value > 2:
        ways.insert(0, "set model.dtype to bfloat16")
    says = (
        f"{' and '.join(needed)} the model needs {total / GB:.0f} GB of the memory of a machine "
        f"of {pool.name}, which has {have / GB:.0f} GB: {', or '.join(ways)}"
    )
    return MemoryVerdict("machine", pool.name, count, needed, have, says, fits=False)


def shm_verdict(
    model: ModelShape, pool: Pool, num_machines: int, demand: Demand
) -> MemoryVerdict | None:
    """Return whether ``/dev/shm`` of a pool's machines holds the weights; None if nothing is there.

    The engines of a machine share one copy of each version.
    """
    if not demand.shm_copies or not pool.shm_bytes:
        return None
    each, have = shm_bytes(model, demand), float(pool.shm_bytes)
    needed = {f"{demand.shm_copies} versions of the weights": each}
    if each <= have:
        return MemoryVerdict("/dev/shm", pool.name, num_machines, needed, have)
    says = (
        f"{demand.shm_copies} versions of the weights need {each / GB:.1f} GB of /dev/shm of each "
        f"machine of {pool.name}, which has {have / GB:.1f} GB: enlarge it (mount -o "
        f"remount,size={math.ceil(each / GB * 1.1)}G /dev/shm) and set shm_gb in the cluster file, "
        "or send weights from device to device (weights: collective)"
    )
    return MemoryVerdict("/dev/shm", pool.name, num_machines, needed, have, says, fits=False)


def _host_bytes(model: ModelShape, num_ranks: int, there: int, on_host: bool) -> dict[str, float]:
    """Return the peak host memory of a machine's ranks by purpose; see the module docstring."""
    whole = 4.0 * model.num_params
    embedding = 4.0 * model.vocab_size * (model.width or model.num_heads * model.head_dim)
    loading = whole if num_ranks == 1 else there * embedding / num_ranks
    name, most = max(
        ("loading", loading), ("exporting", model.weight_bytes), key=lambda found: found[1]
    )
    kept = {"shards": there * whole / num_ranks} if on_host and num_ranks > 1 else {}
    return {**kept, name: most}


def _offloaded_bytes(rank: Mapping[str, float]) -> float:
    """Return the host memory for the tensors that a rank keeps between two batches."""
    return sum(rank.get(name, 0.0) for name in ("weights", "Adam's moments", "reference"))


def _holds(model: ModelShape, have: float, devices: int, longest: int) -> bool:
    if model.num_heads % devices:
        return False
    row = engine_model(model, devices).kv_bytes_per_token * longest
    return (model.weight_bytes + row) / devices <= have


def _changed(run: TrainingNumbers, changes: Mapping[str, int | bool]) -> TrainingNumbers:
    return replace(run, **changes)  # type: ignore[arg-type]


def _least(fits: Callable[[int], bool], above: int) -> int | None:
    """Return the smallest larger number that fits; None if none does."""
    return next((n for n in range(above + 1, MOST_RANKS) if fits(n)), None)


def _halved(fits: Callable[[int], bool], num: int) -> int | None:
    """Return the first half, quarter ... that fits; None if it is too small to be useful."""
    halves = (num >> n for n in range(1, int(math.log2(max(2, num)))))
    return next((half for half in halves if half >= 512 and fits(half)), None)


def verdicts(
    run: ResolvedRun,
    placement: Placement,
    pools: Sequence[Pool],
    demand: Demand,
    workloads: Mapping[str, Workload],
) -> list[MemoryVerdict]:
    """Return whether trainer and engines fit at their placement."""
    model = demand.model
    assert model is not None
    by_name = {pool.name: pool for pool in filled(pools)}
    trainer = by_name[placement.trainer]
    numbers = training_numbers(run, demand)
    on_host = is_cpu(trainer)
    found = [] if on_host else [trainer_verdict(model, trainer, numbers)]
    machine = machine_verdict(
        model,
        trainer,
        demand.num_trainer_ranks,
        on_host=on_host,
        offloaded_bytes=_offloaded_bytes(rank_bytes(model, numbers)) * demand.colocates,
        num_versions=demand.host_copies,
    )
    found += [machine] if machine is not None else []
    for name, num in _engines(run, placement).items():
        machines = _machines(by_name[name], num * demand.engine_devices)
        shm = shm_verdict(model, by_name[name], machines, demand)
        found += [shm] if shm is not None else []
        if is_cpu(by_name[name]):
            continue  # cores have no memory of their own
        rows = _rows(placement, demand, workloads, name)
        found.append(
            engine_verdict(
                model,
                by_name[name],
                num_engines=num,
                devices=demand.engine_devices,
                rows=rows,
                longest=run.config.rollout.max_context_tokens,
                others_bytes=OFFLOADED_BYTES * demand.colocates,
            )
        )
    return found


def training_numbers(run: ResolvedRun, demand: Demand) -> TrainingNumbers:
    """Return the numbers of a run that determine what a trainer rank holds."""
    config, model = run.config, run.config.model
    dtype = model.dtype if isinstance(model, ModelPath | NewModel) else "float32"
    in_bfloat16 = config.trainer.autocast == "bfloat16" or dtype == "bfloat16"
    return TrainingNumbers(
        num_ranks=demand.num_trainer_ranks,
        num_tokens=max(config.trainer.max_tokens_per_microbatch, config.rollout.max_context_tokens),
        recomputes=config.trainer.activation_checkpointing,
        bytes_per_value=2.0 if in_bfloat16 else 4.0,
        num_references=demand.num_references,
        num_trained_params=demand.num_trained_params,
        colocates=demand.colocates,
        bounds_steps=config.trainer.max_kl is not None,
        num_critics=int(config.critic is not None and config.critic.backbone == "own"),
    )


def _engines(run: ResolvedRun, placement: Placement) -> dict[str, int]:
    """Return pool -> number of engines; derived from shares if the mapper does not count them."""
    if placement.num_engines:
        return dict(placement.num_engines)
    shares: dict[str, float] = {}
    for pools in placement.engines.values():
        for name, share in pools.items():
            shares[name] = shares.get(name, 0.0) + share / len(placement.engines)
    num = run.config.runtime.num_engines
    return {name: max(1, round(share * num)) for name, share in shares.items()}


def _machines(pool: Pool, num_devices: int) -> int:
    """Return the number of machines that have this many devices of a pool."""
    return -(-num_devices // (pool.per_node or pool.count))


def _rows(
    placement: Placement, demand: Demand, workloads: Mapping[str, Workload], pool: str
) -> dict[str, tuple[float, Workload]]:
    """Return env -> number of concurrent episodes whose rows are on a pool.

    Episodes that wait for their environment count too: their rows stay in the cache.
    """
    total = sum(demand.weights.get(env_id, 1.0) for env_id in workloads)
    return {
        env_id: (
            demand.max_concurrent
            * demand.weights.get(env_id, 1.0)
            / total
            * placement.engines[env_id].get(pool, 0.0),
            load,
        )
        for env_id, load in workloads.items()
    }
