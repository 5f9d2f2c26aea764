"""The conversation with a model whose tokens only its server knows: text in, text out.

Takes: observations and the server's answers. Gives: the messages of the next turn and the action.
Never: has a token, so nothing of it can be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollart_core.contracts.inference import GenerateResult
from rollart_core.errors import InferenceFailure
from rollart_core.models.tool_calls import ParsedCalls, as_called, checked_calls
from rollart_core.types import Message, Observation, Sample, ToolSpec


class TextConversation:
    """Keep the messages of one episode; see the module."""

    __slots__ = ("_messages", "_num_turns", "parsed", "tools")

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._num_turns = 0
        self.tools: tuple[ToolSpec, ...] = ()
        """What the model may call."""
        self.parsed: ParsedCalls | None = None
        """The newest action, taken apart; None without tools."""

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Tell the model what it may call."""
        self.tools = tuple(tools)

    @property
    def newest(self) -> Message:
        """The newest message: right after :meth:`record` that of the model, with its calls."""
        return self._messages[-1]

    @property
    def prompt(self) -> list[int]:
        """No tokens."""
        return []

    @property
    def messages(self) -> Sequence[Message]:
        """The whole conversation so far: what the engine is given."""
        return tuple(self._messages)

    def turn_limit(self, max_new_tokens: int) -> int:
        """Return how many tokens the next turn may have: the server knows when there are fewer."""
        return max_new_tokens

    def observe(self, observation: Observation) -> None:
        """Show the policy something: text (one user message), or chat messages."""
        if isinstance(observation, str):
            observation = [Message(role="user", content=observation)]
        self._messages += observation

    def record(self, result: GenerateResult) -> str:
        """Take what the model said in this turn, and return it: the action.

        Raises:
            InferenceFailure: When the engine answered tokens instead.
        """
        if result.text is None:
            message = "generate: the engine answered tokens where it was given text"
            raise InferenceFailure(message, boundary="generate")
        said = result.text.content
        called: Message | None = None
        if self.tools:
            self.parsed = checked_calls(said, result.text.tool_calls)
            called = as_called(self.parsed, self._num_turns)
        self._messages.append(called or Message(role="assistant", content=said))
        self._num_turns += 1
        if called is None:
            return said
        calls = [call["function"] for call in called["tool_calls"]]
        written = [f"{call['name']}({call['arguments']})" for call in calls]
        return "\n".join([said, *written]).strip()

    def samples(self) -> tuple[Sample, ...]:
        """Return none."""
        return ()
