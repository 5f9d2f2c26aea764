"""Baselines: episodes that no model plays.

    oracle   what the environment's own expert does
    noop     says nothing, turn after turn
    random   draws among the actions that are offered, or else calls and words of the page

Takes: an episode under way and the request of its next turn. Gives: an action, in the shape of a
text answer. Never: asks an engine, or draws from anything but the seed, the ticket and the turn.
"""

from __future__ import annotations

from typing import Literal, get_args

from rollart_core.contracts.inference import GenerateRequest, GenerateResult, TextAnswer
from rollart_core.errors import EnvironmentFailure, InferenceFailure
from rollart_core.rollout.env_pool import EnvEpisode
from rollart_core.tools.action import ToolAction

BaselineName = Literal["oracle", "noop", "random"]
BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)


class Baseline:
    """Acts in place of the engine.

    Args:
        name: Which of ``BASELINES``.
    """

    def __init__(self, name: BaselineName) -> None:
        self._name = name

    async def __call__(self, episode: EnvEpisode, request: GenerateRequest) -> GenerateResult:
        """Return the next action.

        Raises:
            EnvironmentFailure: When the expert has none.
        """
        action = await self._action(episode, request.sampling_key)
        said = TextAnswer(action)
        if request.tools:
            read = ToolAction.read(action)
            said = TextAnswer(read.content, tool_calls=tuple(call.wire() for call in read.calls))
        return GenerateResult([], [], (), "stop", text=said)

    async def _action(self, episode: EnvEpisode, key: int) -> str:
        if self._name == "noop":
            return ""
        if self._name == "random":
            return await episode.random_action(key)
        action = await episode.oracle()
        if action is None:
            message = "the oracle has no action for this state"
            failure = EnvironmentFailure(message, boundary="env.oracle")
            failure.retryable = False
            raise failure
        return action


class NobodyGenerates:
    """Stands where a run has an engine, in an evaluation without a model."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Refuse.

        Raises:
            InferenceFailure: Always.
        """
        raise InferenceFailure("there is no model in this evaluation", boundary="generate")

    async def release(self, session_id: str) -> None:
        """Forget nothing."""
