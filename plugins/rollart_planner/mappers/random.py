"""Place each environment on a random pool, as a baseline to compare placements with.

Takes: a seed. Gives: the same placement for the same seed, workloads and pools. Never: splits an
environment over pools, or puts environments on accelerators if there are CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool
from rollart_planner.fit import fit, usable_pools
from rollart_planner.mappers.colocate import ColocateMapper


class RandomMapper(HardwareMapper):
    """Draws with ``seed``."""

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Draw a pool for each environment's engines. Trainer and envs have fixed pools.

        Raises:
            ValueError: If no pool has a device.
        """
        usable = sorted(usable_pools(pools), key=lambda pool: pool.name)
        if len(usable) == 1:
            return ColocateMapper().place(workloads, pools)
        found = fit(workloads, usable, self.demand)
        draw = Random(f"{self._seed}")
        able = {e: sorted({w.pool for w in found.ways if w.env_id == e}) for e in found.workloads}
        chosen = {env_id: draw.choice(names) for env_id, names in able.items()}
        env_pool, trainer = draw.choice(found.env_pools), draw.choice(found.trainer_pools)
        return Placement(
            envs=dict.fromkeys(found.workloads, env_pool),
            engines={env_id: {pool: 1.0} for env_id, pool in chosen.items()},
            trainer=trainer,
            rewards=found.reward_pool or "inline",
            reasons=(f"drawn at random with seed {self._seed}",),
        )
