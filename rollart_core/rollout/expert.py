"""Demonstrations: the environment's expert acts, and the episode is recorded as the policy's are.

Takes: an episode under way and the request of its next turn. Gives: what the expert does, as if the
engine had sampled it: logprobs of 0, of the version the episode began with. Never: asks an engine.
"""

from __future__ import annotations

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import ContextOverflow, EnvironmentFailure
from rollart_core.models.chat_template import TemplateRefusal
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.env_episode import EnvEpisode
from rollart_core.rollout.tool_turn import expert_turn
from rollart_core.rollout.tools.action import ToolAction
from rollart_core.types import TokenSpan


class Expert:
    """What the ``oracle()`` of environments does, in tokens.

    Args:
        tokenizer: The policy's.
        start_version: Policy version that the tokens are said to be of.
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
            EnvironmentFailure: When it has none, or the chat template does not take it.
            ContextOverflow: When it does not fit in what room the request leaves.
        """
        action = await episode.oracle()
        if action is None:
            raise _no_use("the oracle has no action for this state")
        text = self._written(action) if self._calls_tools else action
        token_ids = [*self._tokenizer.encode(text), self._tokenizer.stop_token_ids[0]]
        if len(token_ids) > request.max_new_tokens:
            raise ContextOverflow(
                f"the expert's turn takes {len(token_ids)} tokens, and there is room for "
                f"{request.max_new_tokens} (rollout.max_new_tokens, rollout.max_context_tokens)"
            )
        num = len(token_ids)
        return GenerateResult(token_ids, [0.0] * num, (TokenSpan(0, num, self._version),), "stop")

    def _written(self, action: str) -> str:
        """Return an action with tool calls as the policy is to write it."""
        message, _ = expert_turn(ToolAction.read(action))
        try:
            return self._tokenizer.write(message)
        except TemplateRefusal as e:
            raise _no_use(f"the chat template does not take what the oracle calls: {e}") from e


def _no_use(message: str) -> EnvironmentFailure:
    failure = EnvironmentFailure(message, boundary="env.oracle")
    failure.retryable = False
    return failure
