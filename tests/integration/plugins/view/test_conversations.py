"""Conversations of recorded trajectories: who said what, calls, tools and reasoning."""

from __future__ import annotations

import asyncio

import pytest
from support.gateways import TICKET, at_gateway
from support.tool_templates import call_text

from rollart_core.types import Message, Trajectory, Turn
from rollart_view.conversations import conversations, with_reasoning

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def texts(trajectory: Trajectory) -> list[list[str]]:
    return [[m["content"] for m in talk.messages] for talk in conversations(trajectory)]


def test_a_program_with_several_conversations_has_each_of_them_whole() -> None:
    async def main() -> Trajectory:
        async with at_gateway("hermes", ["one", "two", "sub", "three", "other"]) as (
            *_,
            ours,
            http,
        ):
            one = await http.say("a", tools=[TOOL])
            start = [user("a"), {"role": "assistant", "content": one["content"]}]
            two = await http.say([*start, user("b")], tools=[TOOL])
            await http.say("a helper's question")
            more = [user("b"), {"role": "assistant", "content": two["content"]}, user("c")]
            await http.say([*start, *more], tools=[TOOL])
            await http.say([*start, user("instead")], tools=[TOOL])
            return Trajectory(TICKET, "finished", turns=tuple(ours.turns))

    trajectory = asyncio.run(main())
    assert texts(trajectory) == [
        ["a helper's question", "sub"],
        ["a", "one", "b", "two", "c", "three"],
        ["a", "one", "instead", "other"],
    ]
    tools = [[t["function"]["name"] for t in talk.tools] for talk in conversations(trajectory)]
    assert tools == [[], ["add"], ["add"]]


def test_calls_and_their_answers_belong_together() -> None:
    async def main() -> Trajectory:
        call = call_text("hermes", ("add", '{"a": 1}'))
        async with at_gateway("hermes", [call, "done"]) as (*_, ours, http):
            said = await http.say("go", tools=[TOOL])
            answer = {
                "role": "tool",
                "content": "1",
                "tool_call_id": said["tool_calls"][0]["id"],
                "name": "add",
            }
            await http.say([user("go"), said, answer], tools=[TOOL])
            return Trajectory(TICKET, "finished", turns=tuple(ours.turns))

    (talk,) = conversations(asyncio.run(main()))
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = talk.messages[1]["tool_calls"]
    assert call["id"] == talk.messages[2]["tool_call_id"]


def test_an_answer_to_an_unreadable_call_is_said_by_the_user() -> None:
    broken = Message(role="assistant", content="<tool_call>{</tool_call>")
    error = Message(role="tool", content="error: not valid JSON", tool_call_id="x", name="?")
    turns = (
        Turn("go", broken["content"], 1, 1, "stop", 0, 0, 0),
        Turn(
            "",
            "ok",
            1,
            1,
            "stop",
            0,
            0,
            0,
            messages=(error, Message(role="assistant", content="ok")),
        ),
    )
    (talk,) = conversations(Trajectory(TICKET, "finished", turns=turns))
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "user", "assistant"]


def test_a_record_of_an_older_release_is_one_conversation_of_its_texts() -> None:
    turns = tuple(Turn(f"o{i}", f"a{i}", 1, 1, "stop", 0, 0, 0) for i in range(3))
    assert texts(Trajectory(TICKET, "finished", turns=turns)) == [
        ["o0", "a0", "o1", "a1", "o2", "a2"]
    ]
    assert conversations(Trajectory(TICKET, "truncated")) == []


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n42", "hm", "42"),
        ("hm</think>42", "hm", "42"),
        ("<think>hm", "hm", ""),
        ("<think>\n\n</think>\n\n42", None, "42"),
        ("42", None, "42"),
        ("is a </b> tag <think>", None, "is a </b> tag <think>"),
    ],
)
def test_reasoning_is_a_field_of_its_own(text: str, reasoning: str | None, content: str) -> None:
    split = with_reasoning(Message(role="assistant", content=text))
    assert (split.get("reasoning_content"), split["content"]) == (reasoning, content)
    assert with_reasoning(user(text)) == user(text)
    given = Message(role="assistant", content=text, reasoning_content="given")
    assert with_reasoning(given) == given
