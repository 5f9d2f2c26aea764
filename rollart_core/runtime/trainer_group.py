"""The trainer as one thing, though it may be several ranks in processes of their own.

                    call ──> rank 0 ──> answer
                        ├──> rank 1 ──> the same work on its share of tokens and parameters
                        └──> ...

Takes: unstarted Parts, one a rank. Gives: the methods of
:class:`rollart_core.training.trainer.Trainer`. Never: leaves ranks waiting in a collective call for
one that is gone: with one rank the whole group ends, every call says so by ``TrainerLost``, and
``restart`` brings up a fresh group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollart_core.contracts.weights import Publication
from rollart_core.errors import RollartError, TrainerLost, WorkerDied, described
from rollart_core.runtime.factories import RankArgs
from rollart_core.runtime.remote import exit_reason, shut_down
from rollart_core.runtime.worker import Worker
from rollart_core.training.report import TrainStepReport
from rollart_core.types import Group, Sample

BUILD = "rollart_core.runtime.factories:build_trainer"
OPEN_STORE = "rollart_core.training.process_group:open_store"
ANSWER_GRACE_S = 5.0
"""How long the other ranks may go on when one has raised: on a common mistake all raise at once,
otherwise they wait for it in vain."""


class TrainerGroup:
    """One or more trainer ranks.

    Args:
        new_worker: From a rank to a fresh, unstarted part.
        num_ranks: How many.
        kwargs: Arguments of :func:`rollart_core.runtime.factories.build_trainer`, for all ranks
        alike. host: Where the other ranks reach rank 0; None: the address of the machine it is on.
        own_devices: Whether each rank's process sees the devices that it has, and no others.
        watch: Gets each rank once it is built; pings, for one.
    """

    def __init__(
        self,
        new_worker: Callable[[int], Worker],
        num_ranks: int,
        kwargs: Mapping[str, Any],
        *,
        host: str | None = None,
        own_devices: bool = False,
        watch: Callable[[Worker], None] = lambda part: None,
    ) -> None:
        self._watch = watch
        self._new_part = new_worker
        self._kwargs = kwargs
        self._host = host
        self._own_devices = own_devices
        self._num_ranks = num_ranks
        self._parts: list[Worker] = []
        self._lost: str | None = None
        self._dead: Worker | None = None
        self._turn = asyncio.Lock()
        self.num_restarts = 0
        self.on_lost: Callable[[RollartError], None] | None = None
        """Called with ``TrainerLost`` when a rank dies, whether or not it was asked for anything:
        what the engines wait for (its weights) may be what the next batch waits for."""
        self._telling: asyncio.Task[None] | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return self._num_ranks

    async def start(self) -> None:
        """Start the ranks, let them find each other, and load the model in each.

        Raises:
            TrainerLost: When a rank died meanwhile.
            Exception: Whatever a rank raised; the group is ended then.
        """
        self._lost, self._dead = None, None
        self._parts = [self._new_part(rank) for rank in range(self._num_ranks)]
        for part in self._parts:
            part.on_death = self._on_death
        if self._num_ranks == 1:
            await self._on_all(lambda rank, part: part.start(BUILD, self._kwargs))
        else:
            await self._build_ranks()
        for part in self._parts:
            self._watch(part)

    async def _build_ranks(self) -> None:
        await self._on_all(lambda rank, part: part.start())
        store = await self._on_first(OPEN_STORE, self._host)

        def build(rank: int, part: Worker) -> Awaitable[Any]:
            ranks = RankArgs(rank, self._num_ranks, store, self._own_devices)
            return part.call("__build__", BUILD, {**self._kwargs, "ranks": ranks})

        await self._on_all(build)

    async def restart(self) -> None:
        """End what is left and start a fresh group, with the weights the model began with.

        Raises:
            TrainerLost: When a rank died meanwhile.
        """
        self.num_restarts += 1
        await self.close()
        await self.start()

    async def train_batch(
        self, groups: list[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        """Update the weights on a batch, at a share of ``stop`` for the schedule."""
        reports: list[TrainStepReport] = await self.call(
            "train_batch", groups, policy_version, progress=progress
        )
        return reports

    async def supervise(self, samples: list[Sample], lr: float) -> dict[str, float]:
        """Take one supervised step."""
        metrics: dict[str, float] = await self.call("supervise", samples, lr)
        return metrics

    async def publish(self, policy_version: int) -> Publication:
        """Put the weights on the channel."""
        publication: Publication = await self.call("publish", policy_version)
        return publication

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of :class:`rollart_core.training.trainer.Trainer` on all ranks.

        Returns:
            What rank 0 answered.

        Raises:
            TrainerLost: When a rank is gone, raised what the others did not, or cannot reach the
                others; the group is ended.
            Exception: What all ranks raised alike; the group is as it was.
        """
        async with self._turn:
            return await self._on_all(lambda rank, part: part.call(method, *args, **kwargs))

    async def close(self) -> None:
        """End all ranks; may be called twice."""
        parts, self._parts = self._parts, []
        self._lost = self._lost or "the trainer is closed"
        await asyncio.gather(*(shut_down(part, "close") for part in parts))

    async def _on_first(self, method: str, *args: Any) -> str:
        try:
            answer: str = await self._parts[0].call(method, *args)
        except WorkerDied as e:
            self._lose(str(e), self._parts[0])
            raise TrainerLost(str(e)) from e
        return answer

    async def _on_all(self, send: Callable[[int, Worker], Awaitable[Any]]) -> Any:
        """Send something to every rank and return rank 0's answer."""
        if self._lost is not None:
            raise TrainerLost(self._lost)
        parts = self._parts
        tasks = [asyncio.ensure_future(send(rank, part)) for rank, part in enumerate(parts)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.wait(tasks, timeout=ANSWER_GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
        late = [rank for rank, task in enumerate(tasks) if not task.done()]
        await asyncio.gather(*tasks, return_exceptions=True)
        errors = {r: e for r, t in enumerate(tasks) if r not in late and (e := t.exception())}
        if not errors:
            return tasks[0].result()
        raise self._verdict(errors, parts)

    def _verdict(
        self, errors: Mapping[int, BaseException], parts: Sequence[Worker]
    ) -> BaseException:
        """Return what to raise; ends the group unless all ranks raised the same."""
        for rank, error in errors.items():
            if isinstance(error, WorkerDied):
                self._lose(str(error), parts[rank])
                if self._dead is parts[rank]:
                    self._lost = str(error)  # says more than hearing of the death did
        error = next(iter(errors.values()))
        if self._lost is None:
            alike = len(errors) == len(parts) and len({described(e) for e in errors.values()}) == 1
            if alike and not _is_of_the_link(error):
                return error
            what = described(error)
            dead = parts[next(iter(errors))]
            self._lose(f"the {dead.name} process raised {what}", dead)
            if isinstance(error, RollartError):
                return error
        lost = TrainerLost(self._lost)
        lost.__cause__ = error
        return lost

    def _on_death(self, part: Worker) -> None:
        if part in self._parts and self._lost is None:
            self._lose(f"the {part.name} process is gone", part)
            if self.on_lost is not None:
                self._telling = asyncio.ensure_future(self._tell(part))

    async def _tell(self, dead: Worker) -> None:
        why = await exit_reason(dead)
        if self.on_lost is not None and dead in self._parts:  # else it is being started again
            self.on_lost(TrainerLost(why))

    def _lose(self, why: str, dead: Worker) -> None:
        """End the group: who is left would wait for ever for who is gone."""
        if self._lost is None:
            self._lost, self._dead = why, dead
            for part in self._parts:
                part.kill()


def _is_of_the_link(error: BaseException) -> bool:
    """Say whether ranks could not reach each other: all may notice alike, and none can go on.

    torch raises plain RuntimeErrors for it besides its own ``Dist...Error``.
    """
    said = str(error)
    return type(error).__name__.startswith("Dist") or "gloo/" in said or "NCCL" in said
