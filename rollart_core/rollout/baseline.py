"""Players other than the policy: baselines, and the expert of demonstrations.

    oracle   plays the actions of the environment's expert
    noop     plays empty actions
    random   draws from the offered actions, else from tool calls and words of the observation

For an agent task, the oracle solves the task in place of the program, and the no-op leaves it
unchanged. The random player answers the requests of the program, with words of the prompt.

Takes: a running episode and the request of its next turn. Gives: an action as a text answer, or as
tokens for an agent. An :class:`Expert` gives tokens, which are recorded as if the engine had
sampled them. Never: calls an engine, or uses randomness other than the seed, the ticket and the
turn.
"""

from __future__ import annotations

import random
from typing import Literal, get_args

from rollart_core.contracts.inference import GenerateRequest, GenerateResult, TextAnswer
from rollart_core.errors import ContextOverflow, EnvironmentFailure, InferenceFailure
from rollart_core.models.chat_template import TemplateRefusal
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.env_pool import EnvEpisode
from rollart_core.rollout.random_player import random_words
from rollart_core.rollout.tool_turn import expert_turn
from rollart_core.rollout.tools.action import ToolAction
from rollart_core.types import Message, TokenSpan

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
            EnvironmentFailure: If the expert has no action.
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
        return await _expert_action(episode)


class DrawsWords:
    """Replaces the engine, and answers with a word drawn with the request's key.

    Args:
        tokenizer: The tokenizer of requests and answers.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return a word of the prompt or a random word; its logprobs, 0, have no meaning."""
        said = self._tokenizer.decode(request.token_ids, skip_special_tokens=True)
        word = random_words(random.Random(request.sampling_key), said, None)
        tokens = [*self._tokenizer.encode(word), self._tokenizer.stop_token_ids[0]]
        tokens = tokens[: request.max_new_tokens]
        ended = tokens[-1] == self._tokenizer.stop_token_ids[0]
        spans = (TokenSpan(0, len(tokens), 0),)
        return GenerateResult(tokens, [0.0] * len(tokens), spans, "stop" if ended else "length")

    async def release(self, session_id: str) -> None:
        """Do nothing."""


class NobodyGenerates:
    """Replaces the engine in an evaluation without a model."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raise an error.

        Raises:
            InferenceFailure: Always.
        """
        raise InferenceFailure("this evaluation has no model", boundary="generate")

    async def release(self, session_id: str) -> None:
        """Do nothing."""


class Expert:
    """Plays the actions of ``oracle()`` as tokens.

    Args:
        tokenizer: The policy's tokenizer.
        start_version: The policy version that is recorded for the tokens.
        calls_tools: Whether actions are tool calls.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, start_version: int, *, calls_tools: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._version = start_version
        self._calls_tools = calls_tools

    async def __call__(self, episode: EnvEpisode, request: GenerateRequest) -> GenerateResult:
        """Return the expert's next turn.

        Raises:
            EnvironmentFailure: If it has no action, or the chat template refuses it.
            ContextOverflow: If it has more tokens than the request allows.
        """
        text = self._written(await _expert_action(episode))
        token_ids = [*self._tokenizer.encode(text), self._tokenizer.stop_token_ids[0]]
        if len(token_ids) > request.max_new_tokens:
            raise ContextOverflow(
                f"the expert's turn has {len(token_ids)} tokens, but the limit is "
                f"{request.max_new_tokens} (rollout.max_new_tokens, rollout.max_context_tokens)"
            )
        num = len(token_ids)
        return GenerateResult(token_ids, [0.0] * num, (TokenSpan(0, num, self._version),), "stop")

    def _written(self, action: str) -> str:
        """Return an action with tool calls in the policy's format."""
        message = Message(role="assistant", content=action)
        if self._calls_tools:
            message, _ = expert_turn(ToolAction.read(action))
        try:
            return self._tokenizer.write(message)
        except TemplateRefusal as e:
            raise _no_use(f"the chat template refuses the oracle's tool calls: {e}") from e


async def _expert_action(episode: EnvEpisode) -> str:
    action = await episode.oracle()
    if action is None:
        raise _no_use("the oracle has no action for this state")
    return action


def _no_use(message: str) -> EnvironmentFailure:
    failure = EnvironmentFailure(message, boundary="env.oracle")
    failure.retryable = False
    return failure
