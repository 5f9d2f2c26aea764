"""A hardware mapper: place each kind of worker on the pool with most of its main resource.

Generating a token reads all weights, so engines use the pool with the fastest memory. Training
multiplies matrices, so the trainer uses the pool with the fastest arithmetic. Environments use
CPUs if there are any. Pools without figures are compared by their number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool


class {{ cookiecutter.class_name }}(HardwareMapper):
    """Places engines by memory bandwidth, and the trainer by arithmetic."""

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Place everything.

        Raises:
            ValueError: If no pool has a device.
        """
        usable = [pool for pool in pools if pool.count > 0]
        if not usable:
            given = ", ".join(pool.name for pool in pools) or "none"
            raise ValueError(f"no pool has a device (pools given: {given}): set a count above 0")
        engine = max(usable, key=lambda pool: (pool.bytes_per_s * pool.count, pool.count))
        trainer = max(usable, key=lambda pool: (pool.flops_per_s * pool.count, pool.count))
        cpus = [pool for pool in usable if pool.device == "cpu"]
        env = max(cpus or usable, key=lambda pool: pool.count)
        return Placement(
            envs=dict.fromkeys(workloads, env.name),
            engines={env_id: {engine.name: 1.0} for env_id in workloads},
            trainer=trainer.name,
            reasons=(
                f"engines on {engine.name}: the most memory bandwidth",
                f"trainer on {trainer.name}: the most arithmetic",
                f"environments on {env.name}: {'CPUs' if cpus else 'there are no CPUs'}",
            ),
        )
