"""Validations of a run: the same tasks, sampled again for each policy version that is due.

    version 0, every `evaluation.every_batches`, the last one
      --> evaluate --> journal, trackers, display --> is it the best? --> a checkpoint that is kept

Takes: tasks, a way to play them, the recorder. Gives: why training ends, where ``stop.when`` says
so. Never: trains on what it plays, or lets weights change while it does (the caller sees to that).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rollart_core.config.run import RunConfig
from rollart_core.scheduling.evaluate import ClusterOf, EvaluationResult, evaluate
from rollart_core.scheduling.validation_slots import LentPlaces
from rollart_core.scheduling.validations import Validation
from rollart_core.store.recorder import RunRecorder
from rollart_core.types import Task, Ticket, Trajectory

TICKETS = "validation"
"""Part of the ticket ids: the same each time, so that all validations draw the same random numbers
and differences between them are those of the weights."""


@dataclass(frozen=True, slots=True)
class ValidatorDependencies:
    """What validations are made of."""

    recorder: RunRecorder
    tasks: Sequence[Task]
    attempt: Callable[[int, Ticket], Awaitable[Trajectory]]
    """Plays one attempt of a ticket with a policy version."""
    cluster_of: ClusterOf | None = None
    """By what intervals are clustered; None: by task."""


class Validator:
    """Implements :class:`rollart_core.scheduling.controller.ValidatorHandle`."""

    def __init__(self, config: RunConfig, parts: ValidatorDependencies) -> None:
        """Describe it.

        Args:
            config: The run config, with ``evaluation.every_batches``.
            parts: What validations are made of.
        """
        assert config.evaluation.every_batches is not None
        self._config = config
        self._every = config.evaluation.every_batches
        self._parts = parts
        self._playing: asyncio.Future[EvaluationResult] | None = None
        self._cancelled = False
        self.on_validated: Callable[[Validation], Awaitable[None]] | None = None
        """Called after each validation, when the best checkpoint is safe."""

    def is_due(self, policy_version: int) -> bool:
        """Return whether a version is to be validated, and has not been yet."""
        known = self._parts.recorder.validations.has(policy_version)
        return policy_version % self._every == 0 and not known and not self._cancelled

    async def validate(self, policy_version: int, places: LentPlaces | None = None) -> str | None:
        """Validate what the engines hold; return why training ends, if ``stop.when`` says so.

        Raises:
            ConfigError: When the run follows a metric that none of its environments has.
            TrainerLost: When the trainer died over the checkpoint of the best version.
        """
        recorder, began = self._parts.recorder, time.perf_counter()
        result = await self._play(policy_version, places)
        if result is None:
            return None
        validation = recorder.validated(policy_version, result, time.perf_counter() - began)
        if self._config.checkpoint.keep_best is not None:
            await recorder.keep_best(policy_version)
        await recorder.keep_good(policy_version)
        if self.on_validated is not None:
            await self.on_validated(validation)
        return self.stop_reason()

    async def finish(self, policy_version: int, load: Callable[[int], Awaitable[object]]) -> None:
        """Validate the last version, unless it has been.

        Args:
            policy_version: The last one.
            load: Brings the engines to it, which may still have been on their way there.
        """
        if not self._cancelled and not self._parts.recorder.validations.has(policy_version):
            await load(policy_version)
            await self.validate(policy_version)

    def stop_reason(self) -> str | None:
        """Return why training ends by the validations so far; None: it goes on."""
        return self._parts.recorder.validations.stop_reason()

    def cancel(self) -> None:
        """End a validation that goes on, without a result, and make no other one."""
        self._cancelled = True
        if self._playing is not None:
            self._playing.cancel()

    async def _play(self, version: int, places: LentPlaces | None) -> EvaluationResult | None:
        """Play the tasks; None where it was cancelled."""
        if places is not None:
            places.begin(len(self._parts.tasks))
        self._playing = asyncio.ensure_future(
            evaluate(
                self._parts.tasks,
                partial(self._parts.attempt, version),
                name=TICKETS,
                max_concurrent=self._config.rollout.max_concurrent,
                places=places,
                cluster_of=self._parts.cluster_of,
            )
        )
        try:
            await asyncio.wait([self._playing])
            return None if self._playing.cancelled() else self._playing.result()
        finally:
            self._playing.cancel()
            self._playing = None
            if places is not None:
                places.end()
