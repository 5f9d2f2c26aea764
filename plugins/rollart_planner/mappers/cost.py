"""Maximise trajectories for the price. Devices that are not worth their price stay unused.

Takes: workloads and pools with prices. Gives: the placement with the most trajectories/s for the
price of the devices that it uses. Never: counts sunk costs; set the price of devices that are paid
for anyway to 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool
from rollart_planner.fit import usable_pools
from rollart_planner.mappers.colocate import ColocateMapper
from rollart_planner.solve import best_value


class CostMapper(HardwareMapper):
    """Maximises trajectories/s for the price."""

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Return the placement with the lowest price per trajectory.

        Raises:
            ValueError: If something of the run fits no pool, or no pool has a price.
        """
        if len(usable_pools(pools)) == 1:
            return ColocateMapper().place(workloads, pools)
        return best_value(workloads, pools, self.demand)
