"""The interface of a runtime, which starts the workers of a run and stops them together.

Takes: a run config and a run directory. Gives: env workers, engines behind a router, a trainer.
Never: depends on the training loop. The same controller drives every runtime.
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
    """The trainer, in any process; see :class:`rollart_core.training.trainer.Trainer`."""

    on_lost: Callable[[RollartError], None] | None
    """Called with ``TrainerLost`` when the trainer dies, even if no call is in progress."""

    async def train_batch(
        self, groups: list[Any], policy_version: int, *, progress: float | None = None
    ) -> list[Any]:
        """Update the weights on a batch.

        Args:
            groups: The batch.
            policy_version: The version of the weights before the update.
            progress: The used share of ``stop``, in [0, 1], for the learning rate schedule.
        """

    async def supervise(self, samples: list[Sample], lr: float) -> dict[str, float]:
        """Take one supervised step."""

    async def compare(self, samples: list[Sample]) -> dict[str, float]:
        """Return how much the logprobs of samples differ from the engine's."""

    async def publish(self, policy_version: int) -> Any:
        """Publish the weights on the channel."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any other method."""

    async def restart(self) -> None:
        """Start a new trainer after ``TrainerLost``, with the initial weights of the model."""


class Runtime(Protocol):
    """Starts and stops the workers of a run, on one machine or on a cluster."""

    on_lost: Callable[[RollartError], None] | None
    """Called once, if the cluster that the run is on is lost."""

    async def connect(self) -> Sequence[Pool]:
        """Connect to the machines that workers run on; return the available pools."""

    async def place(self, placement: Placement) -> None:
        """Reserve the slots of the workers, and check the nodes that they are on."""

    async def start_envs(self) -> EnvPool:
        """Start the env workers."""

    async def build_model(self, spec: NewModel, corpus_tasks: Sequence[Task]) -> str:
        """Create a new model and return its path."""

    async def start_model(self, model_path: str) -> tuple[Router, TrainerHandle]:
        """Start the inference engines and the trainer with a model."""

    async def start_teacher(self) -> TeacherEngines:
        """Start the engines of the teacher; the run must have one."""

    async def start_demonstrator(self, model_path: str, tasks: Sequence[Task]) -> TakeSamples:
        """Start the worker that produces demonstrations; return a function that takes the next."""

    async def stop_demonstrator(self) -> None:
        """Stop the worker that produces demonstrations."""

    async def close(self) -> None:
        """Stop everything; may be called twice."""
