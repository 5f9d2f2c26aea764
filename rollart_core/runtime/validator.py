"""Validations of a run, and the trained model that they choose.

    version 0, every `evaluation.every_batches`, the last one
      --> evaluate --> journal, trackers, display --> is it the best? --> a checkpoint that is kept
    training ends --> settle(): which version? --> loaded, published --> evaluated --> export()

Takes: tasks, a way to play them, the recorder with its checkpoints. Gives: why training ends, if
``stop.when`` says so; trainer and engines that hold the chosen version, and the folder of the
model. Never: trains on what it plays, or lets weights change while it does (the caller sees to
that); or ends a run because its best checkpoint cannot be loaded (then the last weights are the
result, and a message says so).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollart_core.config.run import RunConfig
from rollart_core.errors import ConfigError, TrainerLost
from rollart_core.runtime.base import TrainerHandle
from rollart_core.scheduling.controller import EnginesHandle
from rollart_core.scheduling.evaluate import ClusterOf, EvaluationResult, evaluate
from rollart_core.scheduling.validation_slots import LentPlaces
from rollart_core.scheduling.validations import Validation
from rollart_core.store.recorder import RunRecorder
from rollart_core.store.run_dir import TRAINED_MODEL
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

    def __init__(self, config: RunConfig, deps: ValidatorDependencies) -> None:
        """Describe it.

        Args:
            config: The run config, with ``evaluation.every_batches``.
            deps: What validations are made of.
        """
        assert config.evaluation.every_batches is not None
        self._config = config
        self._every = config.evaluation.every_batches
        self._deps = deps
        self._playing: asyncio.Future[EvaluationResult] | None = None
        self._cancelled = False
        self.on_validated: Callable[[Validation], Awaitable[None]] | None = None
        """Called after each validation, when the best checkpoint is safe."""

    def is_due(self, policy_version: int) -> bool:
        """Return whether a version is to be validated, and has not been yet."""
        known = self._deps.recorder.validations.has(policy_version)
        return policy_version % self._every == 0 and not known and not self._cancelled

    async def validate(self, policy_version: int, places: LentPlaces | None = None) -> str | None:
        """Validate what the engines hold; return why training ends, if ``stop.when`` says so.

        Raises:
            ConfigError: When the run follows a metric that none of its environments has.
            TrainerLost: When the trainer died over the checkpoint of the best version.
        """
        recorder, began = self._deps.recorder, time.perf_counter()
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
        if not self._cancelled and not self._deps.recorder.validations.has(policy_version):
            await load(policy_version)
            await self.validate(policy_version)

    def stop_reason(self) -> str | None:
        """Return why training ends by the validations so far; None: it goes on."""
        return self._deps.recorder.validations.stop_reason()

    def cancel(self) -> None:
        """End a validation that goes on, without a result, and make no other one."""
        self._cancelled = True
        if self._playing is not None:
            self._playing.cancel()

    async def _play(self, version: int, places: LentPlaces | None) -> EvaluationResult | None:
        """Play the tasks; None where it was cancelled."""
        if places is not None:
            places.begin(len(self._deps.tasks))
        self._playing = asyncio.ensure_future(
            evaluate(
                self._deps.tasks,
                partial(self._deps.attempt, version),
                name=TICKETS,
                max_concurrent=self._config.rollout.max_concurrent,
                places=places,
                cluster_of=self._deps.cluster_of,
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


@dataclass(frozen=True, slots=True)
class ModelDependencies:
    """What holds the weights."""

    recorder: RunRecorder
    trainer: TrainerHandle
    engines: EnginesHandle
    tell: Callable[[str], None]


class TrainedModel:
    """The model that a run has trained: the last weights, or those of the best validation."""

    def __init__(self, config: RunConfig, deps: ModelDependencies) -> None:
        """Take the last weights for the result, until ``settle`` chooses."""
        self._keep_best = config.checkpoint.keep_best is not None
        self._deps = deps
        self._validations = deps.recorder.validations
        self._last = deps.recorder.saved_version
        self._version = self._last

    async def settle(self) -> None:
        """Choose the version; where it is not the last one, bring it to trainer and engines."""
        best = self._validations.best
        if self._keep_best and best is not None and best.policy_version != self._last:
            try:
                await self._again_if_lost(best.policy_version, self._bring)
                self._version = best.policy_version
            except ConfigError as e:
                self._deps.tell(f"{e}: the trained model is the last one.")
                await self._again_if_lost(self._last, self._bring)
        if (fell := self._validations.fell()) is not None:
            self._deps.tell(f"WARNING: {fell}. {self._after_fall()}")

    async def export(self, model_path: str) -> None:
        """Write the model.

        Args:
            model_path: Where its tokenizer lies.
        """
        target = str(self._deps.recorder.run_dir / TRAINED_MODEL)

        async def write(_: int) -> None:
            await self._deps.trainer.call("export_hf", target, model_path)

        await self._again_if_lost(self._version, write)

    def facts(self) -> dict[str, Any]:
        """Return what a report says of it; nothing without validations."""
        found = self._validations
        if not found.all:
            return {}
        return {
            "validations": [one.as_dict() for one in found.all],
            "best": found.point(found.best),
            "last": found.point(found.last),
            "model_policy_version": self._version,
            "choice": self._choice(),
            "fell": found.fell() or "",
        }

    def _choice(self) -> str:
        n, metric = len(self._validations.all), self._validations.metric
        best = self._validations.best
        if not self._keep_best:
            return f"version {self._version}, the last (checkpoint.keep_best is not set)"
        if best is None or self._version != best.policy_version:
            return f"version {self._version}, the last: there are no weights of a better validation"
        which = "the last and the best" if self._version == self._last else "the best"
        return f"version {self._version}, {which} of {n} validations by {metric}"

    def _after_fall(self) -> str:
        if self._version != self._last:
            return f"The trained model is that of version {self._version}."
        return "The trained model is the last one; set checkpoint.keep_best to have the best."

    async def _bring(self, version: int) -> None:
        deps = self._deps
        await deps.recorder.checkpoints.load(version, deps.trainer.call)
        await deps.trainer.publish(version)
        await deps.engines.load_weights(version)

    async def _again_if_lost(self, version: int, work: Callable[[int], Any]) -> None:
        """Do something with a trainer that holds a version; if it is lost, once more."""
        deps = self._deps
        try:
            await work(version)
        except TrainerLost as e:
            deps.tell(f"The trainer is lost ({e}); it is started again.")
            await deps.trainer.restart()
            await deps.recorder.checkpoints.load(version, deps.trainer.call)
            await work(version)
