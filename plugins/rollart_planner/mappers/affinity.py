"""Place each environment on the hardware that suits it, for the fastest placement overall.

Takes: workloads and pools. Gives: prefill-heavy environments on devices with high FLOP/s, and
decode-heavy ones on devices with high bandwidth, as far as that raises the total rate. Never:
needs scipy on a single pool; there everything shares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool
from rollart_planner.fit import usable_pools
from rollart_planner.mappers.colocate import ColocateMapper
from rollart_planner.solve import fastest


class AffinityMapper(HardwareMapper):
    """Maximises trajectories/s."""

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Return the placement with the highest total rate.

        Raises:
            ValueError: If something of the run fits no pool.
        """
        if len(usable_pools(pools)) == 1:
            return ColocateMapper().place(workloads, pools)
        return fastest(workloads, pools, self.demand)
