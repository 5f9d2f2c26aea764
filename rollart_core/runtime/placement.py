"""The placement of one run: made before it starts, made again if its workloads drift from the plan.

    pools -> mapper -> placement -> runtime (where workers start) and router (shares of each env)
               ^                                                        ^
               +-- workloads, measured from finished trajectories ------+

Takes: a resolved run, its pools, finished trajectories. Gives: placements. Never: moves a worker
that has started: a new plan changes which engines an environment's new episodes go to, and no more.
Nor asks twice for one change of a workload.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from rollart_core.config.resolve import Resolution, ResolvedRun
from rollart_core.config.validation.consistency import num_engines
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import (
    Demand,
    HardwareMapper,
    ModelShape,
    Placement,
    Pool,
    Role,
)
from rollart_core.errors import ConfigError, RollartError, described, first_line, text_of
from rollart_core.runtime.workload import WorkloadMeter, departures, shape_of
from rollart_core.types import Ticket, Trajectory

RunEpisode = Callable[[Ticket, int], Awaitable[Trajectory]]


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


class Slotted(Protocol):
    """An engine of the router, as far as a plan looks at it."""

    @property
    def pool(self) -> str:
        """Where it is."""


class PlacedRouter(Protocol):
    """The router, as far as a plan needs it."""

    @property
    def engine_states(self) -> Sequence[Slotted]:
        """Its engines."""

    def place(self, placement: Placement) -> None:
        """Follow another placement."""


class RunPlan:
    """Plans a run, and plans again; see the module.

    Args:
        run: The run.
        event: Keeps an event of the run.
    """

    def __init__(
        self, run: ResolvedRun, event: Callable[[str, Mapping[str, object]], None]
    ) -> None:
        self._run = run
        self._event = event
        self._demand = Demand()
        self._pools: Sequence[Pool] = ()
        self._replanner = Replanner(workloads_of(run))
        self._planning: asyncio.Task[None] | None = None
        self._due: Departure | None = None
        self.placement: Placement | None = None

    def begin(self, pools: Sequence[Pool]) -> Placement:
        """Place the run.

        Raises:
            ConfigError: When the mapper cannot place it on these pools.
        """
        self._pools = pools
        if len(pools) > 1:  # on one pool there is nothing to reckon with
            self._demand = demand_of(self._run)
        self.placement = place(self._run, pools, self._demand)
        self._note(self.placement, workloads_of(self._run), ())
        return self.placement

    def watched(self, run_episode: RunEpisode, router: PlacedRouter) -> RunEpisode:
        """Return the same function, whose trajectories are measured and planned with.

        Those of experts are not: no engine has generated them.
        """
        if self._run.demonstrates:
            return run_episode

        async def watch(ticket: Ticket, start_version: int) -> Trajectory:
            trajectory = await run_episode(ticket, start_version)
            departure = self._replanner.observe(trajectory)
            if departure is not None and len({state.pool for state in router.engine_states}) > 1:
                self._due = departure
                if self._planning is None or self._planning.done():
                    self._planning = asyncio.create_task(self._catch_up(router))
            return trajectory

        return watch

    async def close(self) -> None:
        """End a plan that is being made."""
        if self._planning is not None:
            self._planning.cancel()
            await asyncio.gather(self._planning, return_exceptions=True)

    async def _catch_up(self, router: PlacedRouter) -> None:
        """Plan until nothing has left its plan meanwhile."""
        while (departure := self._due) is not None:
            self._due = None
            await self._again(departure, router)

    async def _again(self, departure: Departure, router: PlacedRouter) -> None:
        """Plan with what was measured, for the engines there are; on failure all stays."""
        assert self.placement is not None
        num_engines = Counter(state.pool for state in router.engine_states)
        group = self._demand.engine_devices
        devices = {pool: group * num for pool, num in num_engines.items()}
        pools = as_built(self._pools, self.placement, devices, self._demand.num_trainer_ranks)
        demand = replace(self._demand, num_engines=None)
        try:
            placement = await asyncio.to_thread(
                place, self._run, pools, demand, departure.workloads
            )
        except Exception as e:  # whatever a mapper raises: the run has a plan that it can keep
            error = first_line(text_of(e))
            if not isinstance(e, RollartError):
                error = f"the mapper raised {described(e)}"
            self._event("plan_kept", {"why": list(departure.why), "error": error})
            return
        if placement.engines != self.placement.engines:
            self.placement = replace(placement, envs=self.placement.envs)
            router.place(self.placement)
            self._note(self.placement, departure.workloads, departure.why)

    def _note(
        self, placement: Placement, workloads: Mapping[str, Workload], why: Sequence[str]
    ) -> None:
        measured = {env_id: asdict(workload) for env_id, workload in workloads.items()}
        self._event(
            "plan", {"placement": asdict(placement), "workloads": measured, "why": list(why)}
        )


def as_built(
    pools: Sequence[Pool],
    placement: Placement,
    engine_devices: Mapping[str, int],
    num_trainer_ranks: int,
) -> list[Pool]:
    """Return the pools as a running run has them: each for what is on it, and nothing else.

    Args:
        pools: What there was to begin with.
        placement: Where things are.
        engine_devices: Pool -> devices of the engines there now.
        num_trainer_ranks: How many the trainer has.
    """
    built = []
    for pool in pools:
        roles: list[Role] = []
        roles += ["envs"] if pool.name in placement.envs.values() else []
        roles += ["engines"] if engine_devices.get(pool.name) else []
        roles += ["trainer"] if pool.name == placement.trainer else []
        roles += ["rewards"] if pool.name == placement.rewards else []
        count = engine_devices.get(pool.name, 0)
        count += num_trainer_ranks if "trainer" in roles else 0
        if "envs" in roles or "rewards" in roles:
            count = max(count, pool.count)
        if roles:
            built.append(replace(pool, count=count, roles=tuple(roles)))
    return built


@dataclass(frozen=True, slots=True)
class Departure:
    """Workloads have left what was planned with."""

    workloads: Mapping[str, Workload]
    """What to plan with now: measured where there is enough, else as before."""
    why: tuple[str, ...]
    """A phrase for each environment that left, such as ``toy/X-v1: turns 9 instead of 3``."""


class Replanner:
    """Watches the workloads of a run.

    Hysteresis: what was measured becomes what is planned with, so the next plan needs another
    ``factor``; and no plan follows the last before ``min_trajectories`` more of the environment.

    Args:
        declared: Env id -> workload of the first plan.
        factor: By how much a figure may differ from the plan's.
        min_trajectories: An environment's means may start a plan after so many, and are part of a
            plan that another started after half of that.
    """

    def __init__(
        self,
        declared: Mapping[str, Workload],
        *,
        factor: float = 1.5,
        min_trajectories: int = 64,
    ) -> None:
        if factor <= 1:
            raise ValueError(f"a factor of {factor:g} would plan again for nothing; it is above 1")
        self._factor = factor
        self._min_trajectories = min_trajectories
        self._planned = dict(declared)
        self._meters = {env_id: WorkloadMeter(w) for env_id, w in declared.items()}
        self._due_at = dict.fromkeys(declared, min_trajectories)

    def observe(self, trajectory: Trajectory) -> Departure | None:
        """Take a finished trajectory; returns what to plan with when that is due."""
        env_id = trajectory.ticket.task.env_id
        meter = self._meters.get(env_id)
        if meter is None:
            return None
        meter.add(trajectory)
        if meter.count < self._due_at[env_id]:
            return None
        self._due_at[env_id] = meter.count + self._min_trajectories
        if not departures(self._planned[env_id], meter.measured, self._factor):
            return None
        return self._depart()

    def _depart(self) -> Departure:
        """Make what was measured what is planned with."""
        why = []
        for env_id, meter in self._meters.items():
            if 2 * meter.count < self._min_trajectories:
                continue
            found = departures(self._planned[env_id], meter.measured, self._factor)
            why += [f"{env_id}: {', '.join(found)}"] if found else []
            self._planned[env_id] = meter.measured
            self._due_at[env_id] = meter.count + self._min_trajectories
        return Departure(dict(self._planned), tuple(why))
