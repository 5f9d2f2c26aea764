"""The placement of one run: made before it starts, made again when its workloads have left it.

    pools -> mapper -> placement -> runtime (where parts start) and router (shares of each env)
               ^                                                        ^
               +-- workloads, measured from finished trajectories ------+

Takes: a resolved run, its pools, finished trajectories. Gives: placements. Never: moves a part that
has started: a new plan changes which engines an environment's new episodes go to, and no more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from rollart_core.config.resolve import ResolvedRun
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Demand, Placement, Pool, Role
from rollart_core.errors import RollartError, described, first_line, text_of
from rollart_core.runtime.placement import demand_of, place, workloads_of
from rollart_core.runtime.replan import Departure, Replanner
from rollart_core.types import Ticket, Trajectory

RunEpisode = Callable[[Ticket, int], Awaitable[Trajectory]]


class Slotted(Protocol):
    """An engine of the router, as far as a plan looks at it."""

    @property
    def pool(self) -> str:
        """Where it is."""


class PlacedRouter(Protocol):
    """The router, as far as a plan needs it."""

    @property
    def seats(self) -> Sequence[Slotted]:
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
            if departure is not None and len({seat.pool for seat in router.seats}) > 1:
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
        seats = Counter(seat.pool for seat in router.seats)
        group = self._demand.engine_devices
        devices = {pool: group * num for pool, num in seats.items()}
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
