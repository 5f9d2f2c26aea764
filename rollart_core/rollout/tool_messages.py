"""What the policy called and what it is answered, as chat messages.

Takes: a parsed message of the policy, the tools, and the environment's answer. Gives: the messages
that chat templates and rewards are shown. Never: runs a tool.
"""

from __future__ import annotations

from rollart_core.models.tool_calls import ParsedCalls, call_id
from rollart_core.types import Message, ToolCall


def as_called(parsed: ParsedCalls, turn: int) -> Message | None:
    """Return the policy's message with its calls; None when it has none.

    What was meant as a call and is none is among them, after the good ones, with the text that the
    policy wrote as its arguments: its answer is an error, and answers need a call.
    """
    bad = [
        ToolCall(
            id=call_id(turn, index),
            type="function",
            function={"name": "unreadable", "arguments": error.text},
        )
        for index, error in enumerate(parsed.errors, len(parsed.calls))
    ]
    calls = [*parsed.calls, *bad]
    return Message(role="assistant", content=parsed.content, tool_calls=calls) if calls else None
