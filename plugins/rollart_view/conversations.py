"""The conversations of recorded trajectories, as messages.

Takes: trajectories, also of older releases, which record only texts. Gives: one conversation per
episode of an environment; for an agent program, one for each conversation that it had. Never: reads
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollart_core.types import FailureKind, Message, ToolSpec, Trajectory, Turn

_BEGIN, _END = "<think>", "</think>"
Outcome = Literal["finished", "truncated", "failed", "aborted"]
"""As ``rollart audit`` counts them: ``aborted`` was cancelled, ``failed`` failed by itself."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation, and the tools that were offered in it."""

    messages: tuple[Message, ...]
    """The policy's messages have their calls, and their reasoning as ``reasoning_content``."""
    tools: tuple[ToolSpec, ...]


def outcome_of(trajectory: Trajectory) -> Outcome:
    """Return how an episode ended; a cancelled one did not fail."""
    failure = trajectory.failure
    cancelled = failure is not None and failure.kind is FailureKind.CANCELLED
    return "aborted" if cancelled else trajectory.status


def conversations(trajectory: Trajectory) -> list[Conversation]:
    """Return the conversations of an episode, in the order of their last turns.

    A conversation that another one only continues is not repeated.
    """
    before = _before(trajectory.turns)
    continued = set(before)
    last = [index for index in range(len(before)) if index not in continued]
    return [_conversation(trajectory.turns, before, index) for index in last]


def last_messages(trajectory: Trajectory) -> tuple[Message, ...]:
    """Return the conversation of the last turn as it was, which a reward receives."""
    turns = trajectory.turns
    chain = _chain(turns, _before(turns), len(turns) - 1)
    return tuple(message for turn in chain for message in turn_messages(turn))


def _before(turns: tuple[Turn, ...]) -> list[int]:
    """Return the turn that each turn continues; -1 if it begins a conversation."""
    return [i - 1 if t.continues is None else t.continues for i, t in enumerate(turns)]


def _chain(turns: tuple[Turn, ...], before: list[int], last: int) -> list[Turn]:
    """Return the turns of the conversation that ends with a turn."""
    chain = []
    while last >= 0:
        chain.append(turns[last])
        last = before[last]
    return chain[::-1]


def _conversation(turns: tuple[Turn, ...], before: list[int], last: int) -> Conversation:
    chain = _chain(turns, before, last)
    messages = [message for turn in chain for message in turn_messages(turn)]
    return Conversation(tuple(map(with_reasoning, _answers(messages))), chain[0].tools)


def _answers(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages; an answer to a call that could not be read is one of the user.

    The policy's message with such a call is recorded as text, so that there is no call to answer.
    """
    calls: set[str] = set()
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") not in calls:
            yield Message(role="user", content=message["content"])
            continue
        calls.update(call["id"] for call in message.get("tool_calls") or ())
        yield message


def turn_messages(turn: Turn) -> tuple[Message, ...]:
    """Return the new messages of a turn, the policy's last."""
    observation = Message(role="user", content=turn.observation)
    return turn.messages or (observation, Message(role="assistant", content=turn.action))


def with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning as a field, not in its text.

    The reasoning is the text up to the first ``</think>``; the chat template may have written the
    ``<think>`` before it. A message that ends while it reasons has no other text.
    """
    text = message["content"]
    begins = text.lstrip().startswith(_BEGIN)
    if message["role"] != "assistant" or message.get("reasoning_content"):
        return message
    if _END not in text and not begins:
        return message
    reasoning, _, answer = text.partition(_END)
    reasoning = reasoning.strip().removeprefix(_BEGIN).strip()
    split: Message = {**message, "content": answer.lstrip()}
    if reasoning:
        split["reasoning_content"] = reasoning
    return split
