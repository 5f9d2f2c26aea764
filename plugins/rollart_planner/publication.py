"""Estimate the time of a new version of the weights, and the batches that it limits.

    W bytes of the weights in the engines' dtype, N ranks of the trainer, t devices per engine
    gather   W (N - 1) / N over the link between devices if the ranks share a machine, else over
             the network: a ring all-gather (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005)
    send     from device to device: W over the link, or over the network if there is an engine on
             another machine; a pipelined broadcast takes as long as one copy
             in /dev/shm: W over the host's link on rank 0's machine, then over the network
    swap     from device to device: 2 W / t of memory traffic; in /dev/shm: W / t over the host's
             link, all devices at the same time
    trainer  max(gather, send), and the first bucket of the shorter one: the gather of a bucket
             overlaps the send of the one before. With copies in the host memory of rank 0's machine
             W over the host's link in place of send, which goes on in the background
    stall    the swap; from device to device also the send, because the engine receives into itself

The limits of a batch of B trajectories, of which the longest takes ``longest`` times the mean, with
T the seconds of training and publication per batch and residents(r) the episodes in progress at
rate r (Little's law), S the staleness bound:

    the trainer   r <= B / T
    engines       r (1 + r stall / B) <= r0            they generate only between swaps
    S > 0         longest residents(r) + r T <= (S + 1) B
                  a batch starts S versions before the trainer needs it and ends with its longest
    S = 0         1 / r = 1 / r' + (T + stall) / B, longest residents(r') <= B
                  nothing is generated during training, and the batch shrinks to its longest

Takes: a model, pools, a placement, a demand. Gives: seconds and bytes. Never: measures anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rollart_core.contracts.hardware import Demand, ModelShape, Pool, VersionTime

BUCKET_BYTES = 256 * 2**20
"""The size of a bucket of weights."""
STEPS = 40
"""Bisection steps for a rate."""


def version_time(
    model: ModelShape,
    trainer: Pool,
    engines: Sequence[str],
    pools: Mapping[str, Pool],
    demand: Demand,
) -> VersionTime:
    """Return the time of one version.

    Args:
        model: The model in the engines' dtype.
        trainer: The pool of the trainer.
        engines: Names of the pools with engines.
        pools: Name -> pool.
        demand: The demand of the run.
    """
    size, ranks = model.weight_bytes, demand.num_trainer_ranks
    gather_s = size * (ranks - 1) / ranks / _rate(trainer, ranks)
    away = any(p != trainer.name or not _one_machine(pools[p]) for p in engines)
    copies = demand.shm_copies
    hop = trainer.network_bytes_per_s if away else trainer.link_bytes_per_s
    if copies:
        hop = min(trainer.host_bytes_per_s, hop) if away else trainer.host_bytes_per_s
    send_s = _over(size, hop)
    part = size / demand.engine_devices
    swap_s = max(
        (
            _over(part, pools[p].host_bytes_per_s)
            if copies
            else _over(2 * part, pools[p].bytes_per_s)
            for p in engines
        ),
        default=0.0,
    )
    own_s = _over(size, trainer.host_bytes_per_s) if demand.host_copies else send_s
    first = min(gather_s, own_s) * min(1.0, BUCKET_BYTES / size)
    return VersionTime(
        gather_s=gather_s,
        send_s=send_s,
        swap_s=swap_s,
        trainer_s=max(gather_s, own_s) + first,
        stall_s=swap_s if copies else send_s + swap_s,
    )


def shm_bytes(model: ModelShape, demand: Demand) -> float:
    """Return the bytes in ``/dev/shm`` of each machine with engines or rank 0."""
    return demand.shm_copies * model.weight_bytes


def batch_rate(
    residents: Callable[[float], float],
    engines_per_s: float,
    training_s: float,
    version: VersionTime,
    demand: Demand,
) -> tuple[float, str]:
    """Return the trajectories/s that batches allow, and what limits them.

    Args:
        residents: The number of episodes in progress at a rate.
        engines_per_s: The rate at which engines are always busy.
        training_s: Seconds of the trainer per trajectory, over all of its ranks.
        version: The time of one version of the weights.
        demand: The demand of the run, with the size of a batch.
    """
    num, longest = demand.batch_trajectories, demand.longest
    busy_s = num * training_s + version.trainer_s
    if demand.max_staleness == 0:
        most = _largest(lambda r: longest * residents(r) <= num, engines_per_s)
        return num / (num / most + busy_s + version.stall_s), "batch"
    between = engines_per_s / (1 + engines_per_s * version.stall_s / num)
    total = (demand.max_staleness + 1) * num
    limits = {
        "trainer": num / busy_s,
        "engines": between,
        "batch": _largest(lambda r: longest * residents(r) + r * busy_s <= total, between),
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def _largest(holds: Callable[[float], bool], most: float) -> float:
    """Return the largest rate up to ``most`` at which a condition holds; lower rates hold too."""
    if holds(most):
        return most
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return max(low, most * 1e-9)


def _one_machine(pool: Pool) -> bool:
    return not pool.per_node or pool.count <= pool.per_node


def _rate(pool: Pool, num: int) -> float:
    """Return the bytes/s between ``num`` devices of a pool; infinite if unknown."""
    there = num <= (pool.per_node or pool.count)
    return (pool.link_bytes_per_s if there else pool.network_bytes_per_s) or float("inf")


def _over(num_bytes: float, bytes_per_s: float) -> float:
    """Return seconds; 0 if the rate is unknown."""
    return num_bytes / bytes_per_s if bytes_per_s else 0.0
