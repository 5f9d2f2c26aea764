"""Place everything on one pool.

Takes: workloads and pools. Gives: a placement on the first pool that has a device and is not
serverless. Never: splits a run over pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool
from rollart_planner.fit import computing_pools


class ColocateMapper(HardwareMapper):
    """Places environments, engines and trainer on the first pool with a device."""

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Place everything on that pool.

        Raises:
            ValueError: If no pool has a device, or all that have one are serverless.
        """
        pool = computing_pools(pools)[0]
        return Placement(
            envs=dict.fromkeys(workloads, pool.name),
            engines={env_id: {pool.name: 1.0} for env_id in workloads},
            trainer=pool.name,
            reasons=(f"everything shares {pool.name}, the first pool with a device",),
        )
