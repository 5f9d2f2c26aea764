"""What of a run needs which memory, by the placement that its mapper made.

Takes: a resolved run, its placement, pools and demand. Gives: a verdict for each kind of part and
pool. Never: starts anything, or imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Demand, Placement, Pool
from rollart_core.runtime.workload import total_tokens
from rollart_planner.cluster import filled
from rollart_planner.fit import is_cpu
from rollart_planner.memory import (
    MemoryVerdict,
    TrainingNumbers,
    engine_verdict,
    machine_verdict,
    trainer_verdict,
)


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
