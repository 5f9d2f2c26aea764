"""Scaling of a running job, by command (`rollart scale`) or by the ``scaling`` policy.

    rollart scale --> control socket --+
                                       +--> one change at a time --> the runtime --> journal
    every look_s: scaling policy ------+

Takes: a runtime and the config section ``scaling``. Gives: recorded changes. Never: decides when to
scale (:mod:`rollart_core.runtime.scaling` does), or starts a worker (the runtime does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rollart_core.config.runtime import Scaling
from rollart_core.errors import RollartError, UserError, first_line
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.runtime.control import Control
from rollart_core.runtime.heartbeat import Notify
from rollart_core.runtime.scaling import ClusterLoad, Scaler, engine_pressure, env_pressure

ENGINES, ENV_WORKERS = "engines", "env_workers"
"""Targets that every run can scale; the others are pools, by name."""
MOST = 256
"""Maximum count of a target; a larger count is treated as a typing error."""


class Scalable(Protocol):
    """A runtime whose workers can join and leave."""

    def counts(self) -> Mapping[str, int]:
        """Return the scalable targets and their counts; empty during set-up."""

    async def scale(self, target: str, count: int) -> None:
        """Scale a target of ``counts`` to a count.

        Raises:
            UserError: If the count is not possible.
        """

    def loads(self) -> tuple[list[ClusterLoad], int]:
        """Return the load of each engine that is up, and the number of running episodes."""


class Elastic:
    """Scales a runtime; see the module docstring.

    Args:
        runtime: The runtime to scale.
        scaling: The policy; None: scale only by command.
        notify: Event callback for changes.
    """

    def __init__(self, runtime: Scalable, scaling: Scaling | None, notify: Notify) -> None:
        self._runtime = runtime
        self._scaling = scaling
        self._notify = notify
        self._turn = asyncio.Lock()
        self._control: Control | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open(self, run_dir: Path) -> None:
        """Listen for `rollart scale`, and start the policy if there is one."""
        control = Control(run_dir, self.answer)
        try:
            await control.open()
            self._control = control
        except OSError as e:  # no unix sockets on this file system: no scaling by command
            self._notify("control_off", {"why": first_line(str(e))})
        if self._scaling is not None:
            self._looking = asyncio.create_task(self._look(self._scaling), name="scaling")

    async def close(self) -> None:
        """Stop scaling."""
        await cancel_and_wait(self._looking)
        if self._control is not None:
            await self._control.close()

    async def answer(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """Execute a request ``{"scale": {target: count}}``; without ``scale``, only count."""
        wanted = request.get("scale", {})
        if not isinstance(wanted, dict):
            raise UserError("scale: expected targets with counts, such as {engines: 2}")
        async with self._turn:
            before = dict(self._runtime.counts())
            if not before:
                raise UserError("the run is still being set up; try again later")
            checked = {target: _checked(target, n, before) for target, n in wanted.items()}
            for target, count in checked.items():
                await self._change(target, count, "by hand")
            return {"before": before, "after": dict(self._runtime.counts())}

    async def _change(self, target: str, count: int, why: str) -> None:
        before = self._runtime.counts()[target]
        if count == before:
            return
        change = {"target": target, "before": before, "asked": count, "why": why}
        try:
            await self._runtime.scale(target, count)
        except Exception as e:
            after = self._runtime.counts().get(target, 0)
            self._notify("scale_failed", {**change, "after": after, "error": first_line(str(e))})
            if isinstance(e, RollartError):
                raise
            raise UserError(f"{target}={count}: {type(e).__name__}: {first_line(str(e))}") from e
        self._notify("scaled", {**change, "after": self._runtime.counts().get(target, 0)})

    # By policy

    async def _look(self, scaling: Scaling) -> None:
        loop = asyncio.get_running_loop()
        scalers = {
            name: Scaler(limits.min, limits.max, scaling.hold_s, scaling.cool_s)
            for name, limits in ((ENGINES, scaling.engines), (ENV_WORKERS, scaling.env_workers))
            if limits is not None
        }
        while True:
            await asyncio.sleep(scaling.look_s)
            async with self._turn:
                for target, scaler in scalers.items():
                    await self._follow(scaling, target, scaler, loop.time())

    async def _follow(self, scaling: Scaling, target: str, scaler: Scaler, now_s: float) -> None:
        counts = self._runtime.counts()
        if target not in counts:
            return  # set-up is not finished
        loads, num_episodes = self._runtime.loads()
        if target == ENGINES:
            assert scaling.engines is not None
            pressure = engine_pressure(scaling.engines, loads)
        else:
            assert scaling.env_workers is not None
            pressure = env_pressure(scaling.env_workers, num_episodes, counts[target])
        wanted = scaler.decide(now_s, counts[target], pressure)
        if wanted != counts[target]:
            try:
                await self._change(target, wanted, "high load" if pressure.high else "low load")
            except RollartError:
                return  # already recorded; the policy tries again after cool_s


def _checked(target: str, count: object, known: Mapping[str, int]) -> int:
    """Return the count if it is valid.

    Raises:
        UserError: If the target is unknown or the count is not valid.
    """
    if target not in known:
        given = ", ".join(f"{name} ({n})" for name, n in known.items())
        raise UserError(f"{target}: no such thing to scale; this run has {given}")
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST:
        raise UserError(f"{target}={count}: give a whole number, at least 0, at most {MOST}")
    return count
