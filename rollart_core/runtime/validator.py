"""Validations of a run, and the choice of the trained model.

    version 0, every `evaluation.every_batches`, the last one
      --> evaluate --> journal, trackers, display --> is it the best? --> keep its checkpoint
    training ends --> settle(): which version? --> loaded, published --> evaluated --> export()

Takes: tasks, a function that plays them, the recorder with its checkpoints. Gives: the reason why
training ends, if ``stop.when`` is met; the chosen version in trainer and engines, and the folder of
the model. Never: trains on validation episodes, or ends a run because its best checkpoint cannot be
loaded (then the last weights are the result, and a message reports it). The caller ensures that
weights do not change during a validation.
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
from rollart_core.runtime.remote import TrainerGroup
from rollart_core.scheduling.controller import EnginesHandle
from rollart_core.scheduling.evaluate import ClusterOf, EvaluationResult, evaluate
from rollart_core.scheduling.validation_slots import LentPlaces
from rollart_core.scheduling.validations import Validation
from rollart_core.store.recorder import RunRecorder
from rollart_core.store.run_dir import TRAINED_MODEL
from rollart_core.types import Task, Ticket, Trajectory

TICKETS = "validation"
"""Part of the ticket ids. It is constant, so that all validations use the same random numbers and
differ only by their weights."""


@dataclass(frozen=True, slots=True)
class ValidatorDependencies:
    """The objects that validations use."""

    recorder: RunRecorder
    tasks: Sequence[Task]
    attempt: Callable[[int, Ticket], Awaitable[Trajectory]]
    """Plays one attempt of a ticket with a policy version."""
    cluster_of: ClusterOf | None = None
    """The cluster of a task, for intervals; None: intervals are clustered by task."""


class Validator:
    """Implements :class:`rollart_core.scheduling.controller.ValidatorHandle`."""

    def __init__(self, config: RunConfig, deps: ValidatorDependencies) -> None:
        """Describe the validations.

        Args:
            config: The run config, with ``evaluation.every_batches``.
            deps: The objects that validations use.
        """
        assert config.evaluation.every_batches is not None
        self._config = config
        self._every = config.evaluation.every_batches
        self._deps = deps
        self._playing: asyncio.Future[EvaluationResult] | None = None
        self._cancelled = False
        self.on_validated: Callable[[Validation], Awaitable[None]] | None = None
        """Called after each validation, once the best checkpoint is stored."""

    def is_due(self, policy_version: int) -> bool:
        """Return whether a version must be validated and has not been validated yet."""
        known = self._deps.recorder.validations.has(policy_version)
        return policy_version % self._every == 0 and not known and not self._cancelled

    async def validate(self, policy_version: int, places: LentPlaces | None = None) -> str | None:
        """Validate the weights in the engines; return why training ends, if ``stop.when`` is met.

        Raises:
            ConfigError: If none of the run's environments has the followed metric.
            TrainerLost: If the trainer dies while it saves the checkpoint of the best version.
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
        """Validate the last version, unless it is validated already.

        Args:
            policy_version: The last version.
            load: Loads a version into the engines, which may still have an older one.
        """
        if not self._cancelled and not self._deps.recorder.validations.has(policy_version):
            await load(policy_version)
            await self.validate(policy_version)

    def stop_reason(self) -> str | None:
        """Return why the validations so far end training; None: training continues."""
        return self._deps.recorder.validations.stop_reason()

    def cancel(self) -> None:
        """Cancel a running validation, without a result, and start no other one."""
        self._cancelled = True
        if self._playing is not None:
            self._playing.cancel()

    async def _play(self, version: int, places: LentPlaces | None) -> EvaluationResult | None:
        """Play the tasks; return None if cancelled."""
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
    """The objects that have the weights."""

    recorder: RunRecorder
    trainer: TrainerGroup
    engines: EnginesHandle
    notify: Callable[[str], None]


class TrainedModel:
    """The trained model of a run: the last weights, or those of the best validation."""

    def __init__(self, config: RunConfig, deps: ModelDependencies) -> None:
        """Use the last weights as the result, until ``settle`` chooses."""
        self._keep_best = config.checkpoint.keep_best is not None
        self._deps = deps
        self._validations = deps.recorder.validations
        self._last = deps.recorder.saved_version
        self._version = self._last

    async def settle(self) -> None:
        """Choose the version; if it is not the last, load it into trainer and engines."""
        best = self._validations.best
        if self._keep_best and best is not None and best.policy_version != self._last:
            try:
                await self._again_if_lost(best.policy_version, self._bring)
                self._version = best.policy_version
            except ConfigError as e:
                self._deps.notify(f"{e}: the trained model has the last weights.")
                await self._again_if_lost(self._last, self._bring)
        if (fell := self._validations.fell()) is not None:
            self._deps.notify(f"WARNING: {fell}. {self._after_fall()}")

    async def export(self, model_path: str) -> None:
        """Write the model.

        Args:
            model_path: The path of its tokenizer.
        """
        target = str(self._deps.recorder.run_dir / TRAINED_MODEL)

        async def write(_: int) -> None:
            await self._deps.trainer.call("export_hf", target, model_path)

        await self._again_if_lost(self._version, write)

    def facts(self) -> dict[str, Any]:
        """Return the fields of the run report; empty without validations."""
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
            return f"version {self._version}, the last: no weights of a better validation are kept"
        which = "the last and the best" if self._version == self._last else "the best"
        return f"version {self._version}, {which} of {n} validations by {metric}"

    def _after_fall(self) -> str:
        if self._version != self._last:
            return f"The trained model has the weights of version {self._version}."
        return "The trained model has the last weights; set checkpoint.keep_best to get the best."

    async def _bring(self, version: int) -> None:
        deps = self._deps
        await deps.recorder.checkpoints.load(version, deps.trainer.call)
        await deps.trainer.publish(version)
        await deps.engines.load_weights(version)

    async def _again_if_lost(self, version: int, work: Callable[[int], Any]) -> None:
        """Run ``work`` with a version in the trainer; if the trainer is lost, retry once."""
        deps = self._deps
        try:
            await work(version)
        except TrainerLost as e:
            deps.notify(f"The trainer is lost ({e}). It is restarted.")
            await deps.trainer.restart()
            await deps.recorder.checkpoints.load(version, deps.trainer.call)
            await work(version)
