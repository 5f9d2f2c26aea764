"""One turn with tools, from the calls of the policy to the answers of the environment.

Takes: a parsed message of the policy, the tools, and an environment's episode. Gives: the next
observation. Never: fails an episode because of the policy's text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from rollart_core.contracts.tool_format import ParsedMessage
from rollart_core.errors import EnvironmentFailure, boundary
from rollart_core.models.tool_calls import UNREADABLE, call_id
from rollart_core.rollout.env_answers import Observed
from rollart_core.rollout.env_pool import EnvEpisode
from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.tool_set import ToolSet
from rollart_core.types import Message, Observation


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """The valid calls of one message of the policy, and the errors of the others."""

    action: str | None
    """The action for ``env.step``; None if all calls are invalid."""
    order: tuple[str, ...]
    """Ids of all calls, in the order of the message."""
    made: tuple[Call, ...]
    """The calls that the environment makes."""
    errors: tuple[Message, ...]
    """Answers to the other calls."""


def tool_turn(parsed: ParsedMessage, turn: int, tools: ToolSet) -> ToolTurn:
    """Return the turn of a message of the policy.

    Calls that are not JSON, name no tool or have wrong arguments are answered here. The environment
    gets the other calls, or the message as content if there are no calls.
    """
    errors: list[Message] = []
    made: list[Call] = []
    for call in parsed.calls:
        name = call["function"]["name"]
        arguments = json.loads(call["function"]["arguments"])
        problem = tools.problem(name, arguments)
        if problem is None:
            made.append(Call(name, arguments, call["id"]))
        else:
            errors.append(_error(call["id"], name, problem))
    for index, bad in enumerate(parsed.errors, len(parsed.calls)):
        errors.append(_error(call_id(turn, index), UNREADABLE, bad.reason))
    asked = made or not errors
    return ToolTurn(
        ToolAction(parsed.content, tuple(made)).text() if asked else None,
        tuple(call["id"] for call in parsed.calls),
        tuple(made),
        tuple(errors),
    )


def expert_turn(action: ToolAction) -> tuple[Message, ToolTurn]:
    """Return the action of an expert as a message of the policy and as a turn."""
    message = Message(role="assistant", content=action.content)
    if action.calls:
        message["tool_calls"] = [call.wire() for call in action.calls]
    order = tuple(call.id for call in action.calls)
    return message, ToolTurn(action.text(), order, action.calls, ())


async def step_with_tools(
    episode: EnvEpisode, parsed: ParsedMessage, turn: int, tools: ToolSet
) -> Observed:
    """Make the calls in the environment, and return its answers with the errors.

    Raises:
        EnvironmentFailure: As for ``step``, or if a call is not answered.
    """
    with boundary(EnvironmentFailure, "tools"):  # a schema may have unresolvable references
        asked = tool_turn(parsed, turn, tools)
    if asked.action is None:
        return Observed(list(asked.errors), invalid_action=True)
    answer = await episode.step(asked.action)
    with boundary(EnvironmentFailure, "env.step"):
        shown = answered(asked, answer.observation, done=answer.done)
    invalid = answer.invalid_action or bool(asked.errors)
    return replace(answer, observation=shown, invalid_action=invalid)


def answered(turn: ToolTurn, observation: Observation, *, done: bool) -> Observation:
    """Return the environment's answers and the errors, in the order of the calls.

    Args:
        turn: The calls of the policy.
        observation: The observation of ``env.step``. Text is the answer to a single call.
        done: Whether the episode is over; then calls may be unanswered.

    Raises:
        ValueError: If a call is not answered, or an answer belongs to no call.
    """
    if isinstance(observation, str):
        if not turn.made and not turn.errors:
            return observation
        role = "tool" if len(turn.made) == 1 else "user"
        observation = [Message(role=role, content=observation)] if turn.made else []
    shown: list[Message] = [_named(message, turn.made) for message in observation]
    ids = [message["tool_call_id"] for message in shown if message["role"] == "tool"]
    wanted = [call.id for call in turn.made]
    if not done and sorted(ids) != sorted(wanted):
        raise ValueError(f"each call needs one tool message: calls {wanted}, answers {ids}")
    if not turn.errors:
        return shown
    order = {each: index for index, each in enumerate(turn.order)}
    last = len(order)
    return sorted([*shown, *turn.errors], key=lambda m: order.get(m.get("tool_call_id", ""), last))


def _named(message: Message, made: tuple[Call, ...]) -> Message:
    """Return a tool message with the name of its call; for a single call the id is optional."""
    if message["role"] != "tool":
        return message
    if "tool_call_id" not in message and len(made) == 1:
        message = {**message, "tool_call_id": made[0].id}
    names = {call.id: call.name for call in made}
    given = message.get("tool_call_id", "")
    if given not in names:
        raise ValueError(f"a tool message answers {given!r}, which was not called")
    return {**message, "name": names[given]}


def _error(call: str, name: str, problem: str) -> Message:
    return Message(role="tool", content=f"error: {problem}", tool_call_id=call, name=name)
