"""Baselines: episodes that no model plays.

    oracle   what the environment's own expert does
    noop     says nothing, turn after turn
    random   draws among the actions that are offered, or else calls and words of the page

An agent's program owns its loop: in its place the oracle solves the task, and a no-op leaves it as
it lies; only the random player answers what the program asks, with words of its prompt.

Takes: an episode under way and the request of its next turn. Gives: an action, in the shape of a
text answer, or in tokens for an agent. Never: asks an engine, or draws from anything but the seed,
the ticket and the turn.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal, get_args

from rollart_core.contracts.inference import GenerateRequest, GenerateResult, TextAnswer
from rollart_core.errors import EnvironmentFailure, InferenceFailure
from rollart_core.rollout.env_episode import EnvEpisode
from rollart_core.rollout.random_player import random_words
from rollart_core.rollout.tools.action import ToolAction
from rollart_core.types import TokenSpan

if TYPE_CHECKING:
    from rollart_core.models.tokenizer import ChatTokenizer

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


class DrawsWords:
    """Stands where a run has an engine, and answers with a word drawn by the request's key.

    Args:
        tokenizer: What requests and answers are written in.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return a word of the prompt, or of no language; the logprobs, 0, are nobody's."""
        said = self._tokenizer.decode(request.token_ids, skip_special_tokens=True)
        word = random_words(random.Random(request.sampling_key), said, None)
        tokens = [*self._tokenizer.encode(word), self._tokenizer.stop_token_ids[0]]
        tokens = tokens[: request.max_new_tokens]
        ended = tokens[-1] == self._tokenizer.stop_token_ids[0]
        spans = (TokenSpan(0, len(tokens), 0),)
        return GenerateResult(tokens, [0.0] * len(tokens), spans, "stop" if ended else "length")

    async def release(self, session_id: str) -> None:
        """Forget nothing."""


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
