"""Place everything as configured.

Takes: a table from environments to pools. Gives: that placement, checked against the available
pools. Never: changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Placement, Pool, Role
from rollart_core.errors import did_you_mean
from rollart_planner.fit import computing_pools, may, usable_pools

OTHERS = "*"
ROLES: tuple[Role, ...] = ("envs", "engines", "trainer")
T = TypeVar("T")


class StaticMapper(HardwareMapper):
    """Places as configured. The default is the first pool that has a device.

    Args:
        envs: Env -> pool of its workers. ``*`` stands for all others.
        engines: Env -> pool, or pool -> share.
        trainer: Pool of the trainer.
        rewards: ``inline``, or a serverless pool.
    """

    def __init__(
        self,
        *,
        envs: Mapping[str, str] | None = None,
        engines: Mapping[str, str | Mapping[str, float]] | None = None,
        trainer: str | None = None,
        rewards: str = "inline",
    ) -> None:
        self._envs = dict(envs or {})
        self._engines = dict(engines or {})
        self._trainer = trainer
        self._rewards = rewards

    def place(self, workloads: Mapping[str, Workload], pools: Sequence[Pool]) -> Placement:
        """Place everything as configured.

        Raises:
            ValueError: If the tables name envs or pools that do not exist, one line each. Or if
                every pool is serverless.
        """
        usable = usable_pools(pools)
        names = [pool.name for pool in usable]
        computing = computing_pools(pools)
        first = {role: _first(usable, role, computing[0].name) for role in ROLES}
        envs = {e: str(self._of(self._envs, e, first["envs"])) for e in workloads}
        engines = {e: self._shares(e, first["engines"]) for e in workloads}
        trainer = self._trainer or first["trainer"]
        asked = [("envs", pool) for pool in envs.values()]
        asked += [("engines", pool) for shares in engines.values() for pool in shares]
        asked += [("trainer", trainer)]
        asked += [("rewards", self._rewards)] if self._rewards != "inline" else []
        faults = [*self._strangers(workloads), *_missing(asked, names)]
        if faults:
            raise ValueError("\n".join(faults))
        return Placement(
            envs=envs,
            engines=engines,
            trainer=trainer,
            rewards=self._rewards,
            reasons=("set in the config",),
        )

    def _strangers(self, workloads: Mapping[str, Workload]) -> Iterator[str]:
        for table, key in ((self._envs, "envs"), (self._engines, "engines")):
            for env_id in table:
                if env_id not in (OTHERS, *workloads):
                    near = did_you_mean(env_id, list(workloads))
                    yield f"{key}: the run has no environment {env_id!r}.{near}"

    def _shares(self, env_id: str, first: str) -> dict[str, float]:
        given = self._of(self._engines, env_id, first)
        shares = {given: 1.0} if isinstance(given, str) else dict(given)
        total = sum(shares.values())
        return {pool: share / total for pool, share in shares.items()}

    def _of(self, table: Mapping[str, T], env_id: str, first: str) -> T | str:
        return table.get(env_id, table.get(OTHERS, first))


def _first(pools: Sequence[Pool], role: Role, otherwise: str) -> str:
    """Return the first pool that may be used for a role."""
    return next((pool.name for pool in pools if may(pool, role)), otherwise)


def _missing(asked: Sequence[tuple[str, str]], names: Sequence[str]) -> Iterator[str]:
    """Yield an error for each pool that does not exist, once each."""
    for key, pool in dict.fromkeys(asked):
        if pool not in names:
            near = did_you_mean(pool, list(names))
            there = ", ".join(names)
            yield f"{key}: there is no pool {pool!r} with a device.{near} Known: {there}"
