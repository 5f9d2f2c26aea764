"""A conversation in text, for a model whose server does not return tokens.

Takes: observations and the server's answers. Gives: the messages of the next turn and the action.
Never: contains tokens, so it cannot be used for training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.config.run import Rollout
from rollart_core.contracts.inference import GenerateResult
from rollart_core.contracts.tool_format import ParsedMessage
from rollart_core.errors import InferenceFailure
from rollart_core.models.chat_template import with_thought, without_thought
from rollart_core.models.tool_calls import as_called, checked_calls
from rollart_core.types import Message, Observation, Sample, ToolSpec


class TextConversation:
    """The messages of one episode; see the module docstring.

    Args:
        rollout: Its options for observations and thoughts apply; None: the defaults.
        template_kwargs: Values of variables of the server's chat template.
    """

    __slots__ = ("_messages", "_num_turns", "_rollout", "parsed", "template_kwargs", "tools")

    def __init__(
        self, rollout: Rollout | None = None, template_kwargs: Mapping[str, object] | None = None
    ) -> None:
        self._rollout = rollout or Rollout()
        self.template_kwargs = template_kwargs or {}
        """Values of variables of the server's chat template."""
        self._messages: list[Message] = []
        self._num_turns = 0
        self.tools: tuple[ToolSpec, ...] = ()
        """The tools that the model may call."""
        self.parsed: ParsedMessage | None = None
        """The newest action, parsed; None without tools."""

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Set the tools that the model may call."""
        self.tools = tuple(tools)

    @property
    def newest(self) -> Message:
        """The newest message; after :meth:`record`, the model's message with its calls."""
        return self._messages[-1]

    @property
    def prompt(self) -> list[int]:
        """Always empty: there are no tokens."""
        return []

    @property
    def messages(self) -> Sequence[Message]:
        """The whole conversation so far, which is sent to the engine.

        Thoughts are part of it only with ``rollout.keep_thinking: true``.
        """
        keeps = self._rollout.keep_thinking
        return tuple(m if keeps else without_thought(m) for m in self._messages)

    def turn_limit(self, max_new_tokens: int) -> int:
        """Return the token limit of the next turn; the server enforces its context length."""
        return max_new_tokens

    def observe(self, observation: Observation) -> None:
        """Add an observation: text (one user message), or chat messages."""
        if isinstance(observation, str):
            is_tool = self._num_turns and self._rollout.observation_role == "tool"
            observation = [Message(role="tool" if is_tool else "user", content=observation)]
        self._messages += observation

    def record(self, result: GenerateResult) -> str:
        """Add the model's message of this turn, and return it as the action.

        Raises:
            InferenceFailure: If the engine returned tokens instead of text.
        """
        if result.text is None:
            message = "generate: the engine returned tokens for a request in text"
            raise InferenceFailure(message, boundary="generate")
        said = result.text.content
        called: Message | None = None
        if self.tools:
            self.parsed = checked_calls(said, result.text.tool_calls)
            called = as_called(self.parsed, self._num_turns)
        answer = called or Message(role="assistant", content=said)
        self._messages.append(with_thought(answer, result.text.reasoning))
        self._num_turns += 1
        if called is None:
            return said
        calls = [call["function"] for call in called["tool_calls"]]
        written = [f"{call['name']}({call['arguments']})" for call in calls]
        return "\n".join([said, *written]).strip()

    def samples(self) -> tuple[Sample, ...]:
        """Return an empty tuple: there are no tokens."""
        return ()
