"""What a runtime offers a run: its parts, started somewhere, and ended together.

Takes: a run config and a run directory. Gives: env workers, engines behind a router, a trainer.
Never: knows the loop; the same controller drives every runtime.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rollart_core.config.model import NewModel
from rollart_core.contracts.hardware import Placement, Pool
from rollart_core.errors import RollartError
from rollart_core.inference.router import Router
from rollart_core.inference.teacher import TeacherEngines
from rollart_core.rollout.env_pool import EnvPool
from rollart_core.types import Sample, Task

TakeSamples = Callable[[int], Awaitable[list[Sample]]]


class TrainerHandle(Protocol):
    """The trainer, wherever it executes; see :class:`rollart_core.training.trainer.Trainer`."""

    on_lost: Callable[[RollartError], None] | None
    """Called with ``TrainerLost`` when it dies, whether or not it was asked for anything."""

    async def train_batch(
        self, groups: list[Any], policy_version: int, *, progress: float | None = None
    ) -> list[Any]:
        """Update the weights on a batch, at a share of ``stop`` for the schedule."""

    async def supervise(self, samples: list[Sample], lr: float) -> dict[str, float]:
        """Take one supervised step."""

    async def publish(self, policy_version: int) -> Any:
        """Put the weights on the channel."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any other method."""

    async def restart(self) -> None:
        """Bring up a fresh one after ``TrainerLost``, with the weights the model began with."""


class Runtime(Protocol):
    """Where the parts of a run execute."""

    on_lost: Callable[[RollartError], None] | None
    """Called once, when what the run is on (a cluster) is gone."""

    async def connect(self) -> Sequence[Pool]:
        """Reach what the parts are to run on; return what there is."""

    async def place(self, placement: Placement) -> None:
        """Make sure that there is room, and all else that the parts need, where they will be."""

    async def start_envs(self) -> EnvPool:
        """Start the env workers."""

    async def build_model(self, spec: NewModel, corpus_tasks: Sequence[Task]) -> str:
        """Make a model from nothing and return where it lies."""

    async def start_model(self, model_path: str) -> tuple[Router, TrainerHandle]:
        """Start inference engines and trainer on a model."""

    async def start_teacher(self) -> TeacherEngines:
        """Start the engines that hold the teacher, of a run that has one."""

    async def start_demonstrator(self, model_path: str, tasks: Sequence[Task]) -> TakeSamples:
        """Start whoever makes demonstrations."""

    async def stop_demonstrator(self) -> None:
        """End it."""

    async def close(self) -> None:
        """End everything; may be called twice."""
