"""Plugins for :mod:`call_paths` that replace the built-in ones and record their callers."""

from __future__ import annotations

from typing import Any

import torch
from call_paths import note

from rollart_algorithms.grpo import GRPO
from rollart_core.contracts.algorithm import LossBatch
from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.types import Observation
from rollart_envs.toy.bandit import BanditEnv
from rollart_plugins.engines.embedded import EmbeddedEngine
from rollart_plugins.weights.shared_memory import SharedMemoryChannel


class Env(BanditEnv):
    """A bandit."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start a task."""
        note("env.reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pull an arm."""
        note("env.step")
        return super().step(action)


class EpisodeReward(Reward):
    """Returns 0 and 1 in turn, so that members of a group differ and are trained."""

    stateless = True
    _next = 0

    def score(self, request: RewardRequest) -> RewardResult:
        """Score an episode."""
        note("reward.score")
        EpisodeReward._next = 1 - EpisodeReward._next
        return RewardResult(float(EpisodeReward._next))


class Loss(GRPO):
    """GRPO."""

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return GRPO's loss."""
        note("algorithm.loss")
        return super().loss(trainer_logprobs, batch)


class Channel(SharedMemoryChannel):
    """Shared memory, with the engine that records its callers."""


_generate = EmbeddedEngine.generate


async def _noted_generate(self: EmbeddedEngine, request: GenerateRequest) -> GenerateResult:
    note("engine.generate")
    return await _generate(self, request)


EmbeddedEngine.generate = _noted_generate  # type: ignore[method-assign]
