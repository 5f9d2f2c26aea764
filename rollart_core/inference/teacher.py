"""The teacher: computes its logprob of each token that the policy sampled.

    run_episode --> trajectory --> Teacher: each sample to an engine that scores --> trajectory with
                                                                       ``teacher_logprobs`` [T]

Takes: trajectories that did not fail, and inference engines with the teacher model. Gives: the same
trajectories with the signal in their samples. Never: treats a failure of the teacher as a low
logprob. The episode then fails with a type and is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from rollart_core.contracts.inference import InferenceEngine, ScoreRequest
from rollart_core.errors import EngineDied, EpisodeError, InferenceFailure, boundary
from rollart_core.rollout.time_limit import TimeLimit
from rollart_core.types import Sample, Ticket, Trajectory

SIGNAL = "teacher_logprobs"
RETRY_S = 1.0
"""Seconds between two attempts while the teacher's engine restarts."""

RunEpisode = Callable[[Ticket, int], Awaitable[Trajectory]]


class TeacherEngines:
    """Scores trajectories. Each sample goes to the engine with the least load.

    Args:
        engines: Started engines, at least one.
        temperature: The policy's sampling temperature. The teacher uses the same.
        limit_s: Maximum seconds for one trajectory, including restarts of an engine.
    """

    def __init__(
        self, engines: Sequence[InferenceEngine], *, temperature: float, limit_s: float
    ) -> None:
        self._engines = list(engines)
        self._temperature = temperature
        self._limit_s = limit_s
        self._busy = [0] * len(self._engines)
        self._numbers = count()

    def after(self, run_episode: RunEpisode) -> RunEpisode:
        """Return a function that runs an episode and then scores it with the teacher."""

        async def run_and_judge(ticket: Ticket, start_version: int) -> Trajectory:
            return await self.judge(await run_episode(ticket, start_version))

        return run_and_judge

    async def judge(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the signal. If scoring fails, the trajectory is failed."""
        if trajectory.failure is not None:
            return trajectory
        try:
            async with TimeLimit("teacher", self._limit_s):
                samples = [await self._judged(s) for s in trajectory.samples]
        except EpisodeError as e:
            return Trajectory(
                trajectory.ticket,
                "failed",
                turns=trajectory.turns,
                failure=e.failure(),
                start_version=trajectory.start_version,
                wall_s=trajectory.wall_s,
            )
        return replace(trajectory, samples=tuple(samples))

    async def _judged(self, sample: Sample) -> Sample:
        row = np.zeros(sample.num_tokens, dtype=np.float32)
        if sample.num_loss_tokens:
            row[sample.loss_mask] = await self._scores(sample)
        return replace(sample, signals={**sample.signals, SIGNAL: row})

    async def _scores(self, sample: Sample) -> list[float]:
        request = ScoreRequest(
            request_id=f"teacher-{next(self._numbers)}",
            token_ids=[int(t) for t in sample.token_ids],
            positions=[int(i) for i in np.flatnonzero(sample.loss_mask)],
            temperature=self._temperature,
        )
        while True:
            which = min(range(len(self._engines)), key=lambda i: (self._busy[i], i))
            self._busy[which] += 1
            try:
                with boundary(InferenceFailure, "teacher"):
                    scores = await self._engines[which].score(request)
                break
            except EngineDied:
                if self._engines[which].health == "lost":
                    raise
                await asyncio.sleep(RETRY_S)  # the engine restarts; the time limit still applies
            finally:
                self._busy[which] -= 1
        if len(scores) != len(request.positions) or not np.isfinite(scores).all():
            raise InferenceFailure(
                f"the teacher returned {len(scores)} logprobs, or some that are not finite, for "
                f"{len(request.positions)} tokens",
                boundary="teacher",
            )
        return scores
