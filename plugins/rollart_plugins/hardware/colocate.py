"""Everything on one pool.

Takes: workloads and pools. Gives: a placement on the first pool that has a device. Never: splits
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool


class ColocateMapper(HardwareMapper):
    """Puts environments, engines and trainer on the first pool with a device."""

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Place everything on that pool.

        Raises:
            ValueError: When no pool has a device.
        """
        pool = next((p for p in pools if p.count > 0), None)
        if pool is None:
            given = ", ".join(f"{p.name} (count {p.count})" for p in pools) or "no pools at all"
            raise ValueError(
                f"colocate needs a pool with at least one device, and was given {given}; "
                "add one to the cluster file, or set its count to 1 or more"
            )
        return Placement(
            envs=dict.fromkeys(workloads, pool.name),
            engines={env_id: {pool.name: 1.0} for env_id in workloads},
            trainer=pool.name,
            reasons=(f"everything shares {pool.name}, the first pool with a device",),
        )
