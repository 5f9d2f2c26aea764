"""The model that a run has trained: the last weights, or those of the best validation.

    training ends --> settle(): which version? --> loaded, published --> evaluated --> export()

Takes: the validations and checkpoints of a run. Gives: trainer and engines that hold the chosen
version, and the folder of the model. Never: trains; or ends a run because its best checkpoint
cannot be loaded (then the last weights are the result, and a message says so).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollart_core.config.run import RunConfig
from rollart_core.errors import ConfigError, TrainerLost
from rollart_core.runtime.base import TrainerHandle
from rollart_core.scheduling.controller import EnginesHandle
from rollart_core.store.recorder import RunRecorder
from rollart_core.store.run_dir import TRAINED_MODEL


@dataclass(frozen=True, slots=True)
class ModelDependencies:
    """What holds the weights."""

    recorder: RunRecorder
    trainer: TrainerHandle
    engines: EnginesHandle
    tell: Callable[[str], None]


class TrainedModel:
    """See the module."""

    def __init__(self, config: RunConfig, parts: ModelDependencies) -> None:
        """Take the last weights for the result, until ``settle`` chooses."""
        self._keep_best = config.checkpoint.keep_best is not None
        self._parts = parts
        self._validations = parts.recorder.validations
        self._last = parts.recorder.saved_version
        self._version = self._last

    async def settle(self) -> None:
        """Choose the version; where it is not the last one, bring it to trainer and engines."""
        best = self._validations.best
        if self._keep_best and best is not None and best.policy_version != self._last:
            try:
                await self._again_if_lost(best.policy_version, self._bring)
                self._version = best.policy_version
            except ConfigError as e:
                self._parts.tell(f"{e}: the trained model is the last one.")
                await self._again_if_lost(self._last, self._bring)
        if (fell := self._validations.fell()) is not None:
            self._parts.tell(f"WARNING: {fell}. {self._after_fall()}")

    async def export(self, model_path: str) -> None:
        """Write the model.

        Args:
            model_path: Where its tokenizer lies.
        """
        target = str(self._parts.recorder.run_dir / TRAINED_MODEL)

        async def write(_: int) -> None:
            await self._parts.trainer.call("export_hf", target, model_path)

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
        parts = self._parts
        await parts.recorder.checkpoints.load(version, parts.trainer.call)
        await parts.trainer.publish(version)
        await parts.engines.load_weights(version)

    async def _again_if_lost(self, version: int, work: Callable[[int], Any]) -> None:
        """Do something with a trainer that holds a version; if it is lost, once more."""
        parts = self._parts
        try:
            await work(version)
        except TrainerLost as e:
            parts.tell(f"The trainer is lost ({e}); it is started again.")
            await parts.trainer.restart()
            await parts.recorder.checkpoints.load(version, parts.trainer.call)
            await work(version)
