"""What fits: the memory of a trainer rank, of an engine and of a machine, and what would mend it.

    a trainer rank of N, in bytes (P parameters, of which O outside of L layers; b bytes a value
    where layers are computed)
        weights 4 P / N, gradients 4 P / N, Adam's moments 8 P / N       all of them float32: there
        is no other master copy (ZeRO, arXiv 1910.02054, section 3.1, stage 3); with trainer.max_kl
        a copy of weights and moments, 12 P / N
        gathered  2 b O + max(3 b l + 4 l, 4 O), l = (P - O) / L: FSDP2 keeps the outermost group
        and its gradient whole, and of layers one at work, the next, and the gradient of one, which
        is summed over ranks in float32
        activations  T (b L h + layer) where layers are computed again, T L layer where not, T
        tokens of a microbatch, and of one layer, a token: b (4 h + 3 q + 3 k + 4 f) of products,
        attention and gate, and 4 (2 h + q + k) of norms, which are in float32; h the width, q and k
        all query and key heads, f the inner width (counted as arXiv 2205.05198, section 4.1 does,
        without dropout, and without scores, which fused attention does not keep)
        logits  (b + 16) V of each sampled token: as they are, and in float32 themselves, their
        logarithms, their probabilities, and the products of both
    a machine whose ranks have devices, in its own memory, the larger of
        loading  4 P of a single rank; of several each reads its shards row by row: at most its rows
        of the largest tensor, the embedding, 4 V h / N
        exporting  b P, on the machine of rank 0
    an engine over t devices
        weights W / t, and K / t for each token in the cache (see :mod:`rollart_planner.roofline`)

Takes: a model's shape, numbers of a run, pools; or a resolved run, with the placement that its
mapper made. Gives: bytes by what they are for, and a verdict for each kind of part and pool.
Never: measures anything. These are estimates: allocators fragment, and kernels take room to work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Demand, ModelShape, Placement, Pool
from rollart_core.runtime.workload import held_tokens, total_tokens
from rollart_planner.cluster import filled
from rollart_planner.devices import GB
from rollart_planner.fit import is_cpu
from rollart_planner.roofline import KV_SHARE, engine_model

TRAIN_SHARE = 0.9
"""Share of a device's memory that a rank may plan with; the rest is CUDA's, NCCL's and lost."""
WHOLE_GRADIENT_BYTES = 2 * 2**30
"""As ``WHOLE_GRADIENT_BYTES`` of ``rollart_core.training.distributed``, without torch."""
MOST_RANKS = 4096
"""With more than so many ranks nothing is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNumbers:
    """What of a run decides what a trainer rank holds."""

    num_ranks: int
    num_tokens: int
    """Of the largest microbatch."""
    sampled_share: float = 1.0
    """Share of its tokens that the policy sampled, and whose logits are needed."""
    recomputes: bool = False
    """Whether layers are computed again for the backward pass."""
    bytes_per_value: float = 2.0
    """Of what layers compute with."""
    num_references: int = 0
    """Models of the same size beside the policy that are not trained."""
    num_critics: int = 0
    """Models of the same size beside the policy that are trained."""
    bounds_steps: bool = False
    """Whether parameters and moments are copied before each step (``trainer.max_kl``)."""


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Whether one kind of part fits where it is."""

    part: str
    """``trainer rank``, ``engine`` or ``machine``."""
    pool: str
    count: int
    """How many there are."""
    needed: Mapping[str, float]
    """What for -> bytes, of one device (of a ``machine``: of the machine)."""
    have_bytes: float
    """That can be had of it; 0: not known."""
    says: str = ""
    """What to change where it does not fit, or what it costs that it barely does."""
    fits: bool = True

    @property
    def needed_bytes(self) -> float:
        """All together."""
        return sum(self.needed.values())


def rank_bytes(model: ModelShape, run: TrainingNumbers) -> dict[str, float]:
    """Return what a trainer rank holds at its fullest, by what it is for; see the module."""
    shard = model.num_params / run.num_ranks
    found = {
        "weights": 4 * shard * (1 + run.num_critics),
        "gradients": 4 * shard * (1 + run.num_critics),
        "Adam's moments": 8 * shard * (1 + run.num_critics),
        "copy before a step": 12 * shard * run.bounds_steps,
        "reference": 4 * shard * run.num_references,
        "gathered": _gathered(model, run),
        "activations": _activations(model, run),
        "logits": run.num_tokens
        * run.sampled_share
        * model.vocab_size
        * (run.bytes_per_value + 16),
    }
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def _gathered(model: ModelShape, run: TrainingNumbers) -> float:
    b, outer = run.bytes_per_value, model.num_outer_params
    if run.num_ranks == 1:  # whole already; autocast keeps a copy of what it has cast
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
    copies = model.experts_per_token * 2 * width  # rows go to each expert, and come back
    b = run.bytes_per_value
    layer = b * (4 * width + 3 * queries + 3 * keys + 4 * inner + copies)
    layer += 4 * (2 * width + queries + keys)
    each = b * model.num_layers * width + layer if run.recomputes else model.num_layers * layer
    return run.num_tokens * each


def trainer_verdict(model: ModelShape, pool: Pool, run: TrainingNumbers) -> MemoryVerdict:
    """Say whether the trainer's ranks fit the devices of a pool."""
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
            f"bring trainer.max_tokens_per_microbatch and rollout.max_context_tokens to {half}"
        )
    ways.append("take devices with more memory")
    says = (
        f"the trainer's {run.num_ranks} rank(s) need {total / GB:.1f} GB each, of "
        f"{have / GB:.1f} GB that a device of {pool.name} has for them: {', or '.join(ways)}"
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
) -> MemoryVerdict:
    """Say whether engines fit, and whether the episodes they are to hold at once do.

    Args:
        model: The model.
        pool: Where they are.
        num_engines: How many.
        devices: Of each.
        rows: Env -> episodes at once on all of these engines, and the workload of each.
        longest: Tokens of the longest row the run allows.
    """
    split = engine_model(model, devices)
    per_token = split.kv_bytes_per_token / devices
    weights, have = model.weight_bytes / devices, KV_SHARE * pool.memory_bytes
    tokens = sum(num * held_tokens(load) for num, load in rows.values()) / max(1, num_engines)
    needed = {"weights": weights, "KV cache": tokens * per_token}
    verdict = MemoryVerdict("engine", pool.name, num_engines, needed, have)
    if not have or weights + tokens * per_token <= have:
        return verdict
    room = have - weights
    if room < longest * per_token:
        least = _least(lambda n: _holds(model, have, n, longest), devices)
        ways = [f"let an engine take {least} devices (engine.tp_size)"] if least else []
        ways += ["lower rollout.max_context_tokens"] if room > 0 else []
        ways.append("take devices with more memory")
        says = (
            f"an engine over {devices} device(s) has {weights / GB:.1f} GB of weights on each and "
            f"{longest * per_token / GB:.1f} GB of its longest row, of {have / GB:.1f} GB that a "
            f"device of {pool.name} has for them: {', or '.join(ways)}"
        )
        return MemoryVerdict("engine", pool.name, num_engines, needed, have, says, fits=False)
    says = (
        f"an engine on {pool.name} has room for {room / (tokens * per_token):.0%} of the rows it "
        "is to hold at once: the others wait, or are computed again. Have more engines, let each "
        "take more devices, or lower rollout.max_concurrent"
    )
    return MemoryVerdict("engine", pool.name, num_engines, needed, have, says)


def machine_verdict(
    model: ModelShape, pool: Pool, num_ranks: int, *, on_host: bool = False
) -> MemoryVerdict | None:
    """Say whether a machine's own memory holds what its ranks put there; None: not known.

    Args:
        model: The model.
        pool: Where the ranks are.
        num_ranks: How many.
        on_host: Whether they also keep their shards there, having no devices with memory.
    """
    if not pool.host_memory_bytes:
        return None
    there = min(num_ranks, pool.per_node or pool.count)
    needed, have = _host_bytes(model, num_ranks, there, on_host), float(pool.host_memory_bytes)
    count, total = -(-num_ranks // there), sum(needed.values())
    if total <= have:
        return MemoryVerdict("machine", pool.name, count, needed, have)
    ways = ["take machines with more memory"]
    if num_ranks == 1:
        ways.insert(0, "set runtime.num_trainer_ranks to 2 or more, of which none loads it whole")
    if "exporting" in needed and model.bytes_per_value > 2:
        ways.insert(0, "set model.dtype to bfloat16")
    says = (
        f"{' and '.join(needed)} the model takes {total / GB:.0f} GB of the memory of a machine "
        f"of {pool.name}, which has {have / GB:.0f} GB: {', or '.join(ways)}"
    )
    return MemoryVerdict("machine", pool.name, count, needed, have, says, fits=False)


def _host_bytes(model: ModelShape, num_ranks: int, there: int, on_host: bool) -> dict[str, float]:
    """Return what some ranks put into one machine's memory at its fullest; see the module."""
    whole = 4.0 * model.num_params
    embedding = 4.0 * model.vocab_size * (model.width or model.num_heads * model.head_dim)
    loading = whole if num_ranks == 1 else there * embedding / num_ranks
    name, most = max(
        ("loading", loading), ("exporting", model.weight_bytes), key=lambda found: found[1]
    )
    kept = {"shards": there * whole / num_ranks} if on_host and num_ranks > 1 else {}
    return {**kept, name: most}


def _holds(model: ModelShape, have: float, devices: int, longest: int) -> bool:
    if model.num_heads % devices:
        return False
    row = engine_model(model, devices).kv_bytes_per_token * longest
    return (model.weight_bytes + row) / devices <= have


def _changed(run: TrainingNumbers, changes: Mapping[str, int | bool]) -> TrainingNumbers:
    return replace(run, **changes)  # type: ignore[arg-type]


def _least(fits: Callable[[int], bool], above: int) -> int | None:
    """Return the least number above this one that fits; None when none does."""
    return next((n for n in range(above + 1, MOST_RANKS) if fits(n)), None)


def _halved(fits: Callable[[int], bool], num: int) -> int | None:
    """Return the first half, quarter ... that fits; None when that is next to nothing."""
    halves = (num >> n for n in range(1, int(math.log2(max(2, num)))))
    return next((half for half in halves if half >= 512 and fits(half)), None)


def verdicts(
    run: ResolvedRun,
    placement: Placement,
    pools: Sequence[Pool],
    demand: Demand,
    workloads: Mapping[str, Workload],
) -> list[MemoryVerdict]:
    """Return whether trainer and engines fit where the placement has them."""
    model = demand.model
    assert model is not None
    by_name = {pool.name: pool for pool in filled(pools)}
    trainer = by_name[placement.trainer]
    numbers = training_numbers(run, demand, workloads)
    on_host = is_cpu(trainer)
    found = [] if on_host else [trainer_verdict(model, trainer, numbers)]
    machine = machine_verdict(model, trainer, demand.num_trainer_ranks, on_host=on_host)
    found += [machine] if machine is not None else []
    for name, num in _engines(run, placement).items():
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
            )
        )
    return found


def training_numbers(
    run: ResolvedRun, demand: Demand, workloads: Mapping[str, Workload]
) -> TrainingNumbers:
    """Return the numbers of a run that decide what a trainer rank holds."""
    config, model = run.config, run.config.model
    dtype = model.dtype if isinstance(model, ModelPath | NewModel) else "float32"
    in_bfloat16 = config.trainer.autocast == "bfloat16" or dtype == "bfloat16"
    decoded = sum(load.turns * load.decode_tokens for load in workloads.values())
    every = sum(total_tokens(load) for load in workloads.values())
    kl = run.algorithm.options.get("kl_coef", 0)
    return TrainingNumbers(
        num_ranks=demand.num_trainer_ranks,
        num_tokens=max(config.trainer.max_tokens_per_microbatch, config.rollout.max_context_tokens),
        sampled_share=decoded / every if every else 1.0,
        recomputes=config.trainer.activation_checkpointing,
        bytes_per_value=2.0 if in_bfloat16 else 4.0,
        num_references=int(config.reference is not None or bool(kl)),
        bounds_steps=config.trainer.max_kl is not None,
        num_critics=int(config.critic is not None and config.critic.backbone == "own"),
    )


def _engines(run: ResolvedRun, placement: Placement) -> dict[str, int]:
    """Return pool -> engines there; where the mapper has not counted them, by its shares."""
    if placement.num_engines:
        return dict(placement.num_engines)
    shares: dict[str, float] = {}
    for pools in placement.engines.values():
        for name, share in pools.items():
            shares[name] = shares.get(name, 0.0) + share / len(placement.engines)
    num = run.config.runtime.num_engines
    return {name: max(1, round(share * num)) for name, share in shares.items()}


def _rows(
    placement: Placement, demand: Demand, workloads: Mapping[str, Workload], pool: str
) -> dict[str, tuple[float, Workload]]:
    """Return env -> its episodes at once whose rows are on a pool, all of them counted.

    Also of those that are with their environment just now: their rows stay in the cache.
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
