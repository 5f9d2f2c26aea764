"""Contract checks of trackers and of hardware mappers.

Takes: a plugin object or a function that makes one. Gives: check results. Never: needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Pool
from rollart_core.contracts.tracker import Tracker
from rollart_testing.results import CheckResult, expect, run_checks

_POOLS = (Pool("first", "cpu", 2, memory_bytes=2**34), Pool("second", "H100", 8))
_WORKLOADS = {"a/A-v1": Workload(), "b/B-v1": Workload(turns=50.0)}


def check_tracker(make: Callable[[], Tracker], run_dir: Path) -> list[CheckResult]:
    """Check a tracker.

    Args:
        make: Makes a fresh tracker.
        run_dir: An empty folder it may write to.
    """
    return run_checks(
        {
            "logs": partial(_check_tracker_logs, make, run_dir),
            "close_before_start": lambda: make().close(),
        }
    )


def check_mapper(mapper: HardwareMapper) -> list[CheckResult]:
    """Check a hardware mapper."""
    return run_checks(
        {
            "places_everything": partial(_check_places, mapper),
            "same_input_same_placement": partial(_check_same_placement, mapper),
            "refuses_no_pools": partial(_check_no_pools, mapper),
        }
    )


def _check_tracker_logs(make: Callable[[], Tracker], run_dir: Path) -> None:
    tracker = make()
    tracker.start(run_dir, {"name": "check", "trainer": {"lr": 1e-3}, "stop": None})
    for train_step in range(3):
        metrics = {"train/loss": 1.0 / (train_step + 1), "rollout/reward": math.nan}
        tracker.log(metrics, train_step=train_step, policy_version=train_step)
    tracker.close()
    tracker.close()


def _check_places(mapper: HardwareMapper) -> None:
    placement = mapper.place(_WORKLOADS, _POOLS)
    names = {pool.name for pool in _POOLS}
    expect(set(placement.envs) == set(_WORKLOADS), f"envs placed: {sorted(placement.envs)}")
    expect(set(placement.engines) == set(_WORKLOADS), f"engines for: {sorted(placement.engines)}")
    expect(set(placement.envs.values()) <= names, f"unknown pools in {dict(placement.envs)}")
    expect(placement.trainer in names, f"the trainer is on unknown pool {placement.trainer!r}")
    for env_id, shares in placement.engines.items():
        expect(set(shares) <= names, f"{env_id}: unknown pools in {dict(shares)}")
        total = sum(shares.values())
        expect(math.isclose(total, 1.0), f"{env_id}: the shares add up to {total:g}, not 1")
    expect(placement.reasons, "it gives no reasons")


def _check_same_placement(mapper: HardwareMapper) -> None:
    expect(mapper.place(_WORKLOADS, _POOLS) == mapper.place(_WORKLOADS, _POOLS), "it wavers")


def _check_no_pools(mapper: HardwareMapper) -> None:
    for pools in ((), (Pool("none", "cpu", 0),)):
        try:
            mapper.place(_WORKLOADS, pools)
        except ValueError as e:
            expect(str(e), "it refuses without a reason")
        else:
            expect(False, f"it places work on {len(pools)} pools without any device")
