"""The plan of one run: its workloads and demand, asked of its mapper.

Takes: a resolved run, pools. Gives: a placement. Never: starts anything; what is placed may be
planned again while it goes on (:mod:`rollart_core.runtime.replan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.config.resolve import Resolution, ResolvedRun
from rollart_core.config.validation.consistency import num_engines
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import (
    Demand,
    HardwareMapper,
    ModelShape,
    Placement,
    Pool,
)
from rollart_core.errors import ConfigError, first_line
from rollart_core.models.shape import shape_of


def workloads_of(run: ResolvedRun | Resolution) -> dict[str, Workload]:
    """Return the workload of each environment, by the name it has in the run: as declared."""
    asked = run.config.rollout.workload
    if asked is not None and len(run.envs) == 1:
        return {run.envs[0].name: Workload(**asked.model_dump())}
    return {env.name: env.spec.workload for env in run.envs}


def demand_of(run: ResolvedRun | Resolution, model: ModelShape | None = None) -> Demand:
    """Return what the run asks of the hardware besides.

    Args:
        run: The run.
        model: Its model's shape, where the config's own is not known.
    """
    runtime = run.config.runtime
    rewards = [reward for env in run.envs if (reward := env.reward) is not None]
    return Demand(
        model=shape_of(run.config.model) or model,
        weights={env.name: env.weight for env in run.envs},
        max_concurrent=run.config.rollout.max_concurrent,
        num_engines=None
        if runtime.kind == "inline" and not run.config.engines
        else num_engines(run.config),
        engine_devices=run.engine_devices,
        num_trainer_ranks=runtime.num_trainer_ranks,
        recomputes=run.config.trainer.activation_checkpointing,
        stateless_rewards=bool(rewards) and all(r.spec.stateless for r in rewards),
    )


def place(
    run: ResolvedRun | Resolution,
    pools: Sequence[Pool],
    demand: Demand,
    workloads: Mapping[str, Workload] | None = None,
) -> Placement:
    """Ask the run's mapper where everything goes.

    Args:
        run: The run.
        pools: What there is.
        demand: What it asks for.
        workloads: As measured; None: as declared.

    Raises:
        ConfigError: When the mapper cannot place the run.
    """
    assert run.mapper is not None
    mapper: HardwareMapper = run.mapper.build()
    mapper.demand = demand
    try:
        return mapper.place(workloads or workloads_of(run), pools)
    except ConfigError:
        raise
    except ValueError as e:
        lines = [first_line(line) for line in str(e).splitlines() or [type(e).__name__]]
        name = run.mapper.spec.id
        raise ConfigError("\n".join(f"mapper {name}: {line}" for line in lines)) from e
