import asyncio
from typing import Annotated, Literal

import pytest
from pydantic import Field
from support.tool_templates import ADD, parse

from rollart_core.models.tool_calls import call_id, checked_calls
from rollart_core.rollout.tool_turn import answered, tool_turn
from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.env import ToolEnv, tool
from rollart_core.rollout.tools.source import ToolError, ToolResult
from rollart_core.rollout.tools.tool_set import ToolSet
from rollart_core.types import Message


class Clerk(ToolEnv):
    def begin(self, task, split, seed):
        return f"task {task} of {split}"

    def said(self, content):
        return ToolResult("over", reward=float(content == "3"), done=True, success=content == "3")

    @tool
    def add(self, a: int, b: Annotated[int, Field(description="The second.")] = 2) -> str:
        """Add two
        whole numbers.

        More that the policy is not shown.
        """
        return str(a + b)

    @tool
    def json(self, title: str, schema: Literal["x", "y"] = "x") -> ToolResult:
        """Names that pydantic keeps to itself."""
        return ToolResult(title + schema, reward=0.25, components={"json": 1.0})

    @tool
    def fail(self) -> str:
        raise ToolError("not today")

    @tool
    def crash(self) -> str:
        raise KeyError("a bug")


class Other:
    closed = 0

    def tools(self):
        return [{"type": "function", "function": {"name": "far", "parameters": {}}}]

    def call(self, name, arguments):
        return f"{name} {dict(arguments)}"

    def close(self):
        self.closed += 1


def _step(env, *calls, content=""):
    named = tuple(Call(name, arguments, f"id{i}") for i, (name, arguments) in enumerate(calls))
    return env.step(ToolAction(content, named).text())


def test_methods_become_tools_with_schemas():
    env = Clerk()
    _, info = env.reset(options={"task": 1, "split": "test"})
    specs = {spec["function"]["name"]: spec["function"] for spec in info["tools"]}
    assert list(specs) == ["add", "json", "fail", "crash"]
    assert specs["add"]["description"] == "Add two whole numbers."
    assert specs["add"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer", "default": 2, "description": "The second."},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert list(specs["json"]["parameters"]["properties"]) == ["title", "schema"]
    ToolSet(info["tools"])


def test_each_call_is_answered_in_order_and_rewards_add_up():
    env = Clerk(sources=[Other()])
    calls = [("add", {"a": 1}), ("json", {"title": "t", "schema": "y"}), ("json", {"title": "u"})]
    shown, reward, terminated, _, info = _step(env, *calls, ("far", {"x": 1}), ("fail", {}))
    contents = ["3", "ty", "ux", "far {'x': 1}", "error: not today"]
    assert [m["content"] for m in shown] == contents
    assert [m["tool_call_id"] for m in shown] == [f"id{i}" for i in range(5)]
    assert (reward, terminated, info) == (0.5, False, {"reward_components": {"json": 1.0}})


def test_speaking_ends_and_nothing_is_called_after_the_end():
    shown, reward, terminated, truncated, info = _step(Clerk(), content="3")
    assert (reward, terminated, truncated, info) == (1.0, True, False, {"success": True})
    assert shown == [{"role": "user", "content": "over"}]
    assert Clerk().step("3")[1] == 1.0, "plain text is what a person types"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("add", {"a": "1"}), "wrong arguments for add: a: "),
        (("add", {"a": 1, "c": 2}), "wrong arguments for add: c: "),
        (("add", {}), "wrong arguments for add: a: "),
        (("ad", {}), "there is no tool 'ad'"),
    ],
)
def test_what_cannot_be_called_is_told(call, told):
    ((answer,), *_) = _step(Clerk(), call)
    assert answer["content"].startswith(f"error: {told}")


def test_a_bug_of_a_tool_is_not_the_policys():
    with pytest.raises(KeyError):
        _step(Clerk(), ("crash", {}))


def test_sources_are_closed_and_parameters_need_types():
    other = Other()
    env = Clerk(sources=[other])
    env.close()
    assert other.closed == 1
    with pytest.raises(TypeError, match="parameter x"):
        tool(lambda self, x: x)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("add", {"a": 1, "b": 2}, None),
        ("add", {"a": 1, "b": "two"}, "b: 'two' is not of type 'integer'"),
        ("add", {"a": 1}, "'b' is a required property"),
        ("ad", {}, "there is no tool 'ad'; there are: add. Did you mean 'add'?"),
    ],
)
def test_arguments_are_held_to_the_schema(name, arguments, told):
    problem = ToolSet([ADD]).problem(name, arguments)
    assert problem is None if told is None else told in problem


BAD_TOOLS = {
    "no list": ("add", "a list"),
    "no tool": ([{"name": "add"}], '"type": "function"'),
    "a name with a space": ([{"function": {"name": "a b"}}], "tool name 'a b'"),
    "two of one name": ([ADD, ADD], "two tools have the name 'add'"),
    "no schema": (
        [{"function": {"name": "f", "parameters": {"type": "thing"}}}],
        "not a JSON schema",
    ),
    "no JSON": ([{"function": {"name": "f", "parameters": {"default": {1}}}}], "are not JSON"),
}


@pytest.mark.parametrize(("specs", "told"), BAD_TOOLS.values(), ids=BAD_TOOLS)
def test_tools_that_are_none_are_refused(specs, told):
    with pytest.raises(ValueError, match=told):
        ToolSet(specs)


def test_nothing_is_fetched_for_a_schema(tmp_path):
    there = tmp_path / "schema.json"
    there.write_text("{}")
    schema = {"$ref": there.as_uri()}
    tools = ToolSet([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    with pytest.raises(Exception, match="Unresolvable"):
        tools.problem("f", {})


def _parsed(*calls):
    blocks = [f'<tool_call>{{"name": "{n}", "arguments": {a}}}</tool_call>' for n, a in calls]
    return parse("ok" + "".join(blocks), "hermes", turn=2)


def test_the_environment_gets_the_good_calls_and_the_policy_all_answers_in_order():
    parsed = _parsed(("ad", "{}"), ("add", '{"a": 1, "b": 2}'), ("add", '{"a"'))
    asked = tool_turn(parsed, 2, ToolSet([ADD]))
    action = ToolAction.read(asked.action)
    assert action == ToolAction("ok", (Call("add", {"a": 1, "b": 2}, call_id(2, 1)),))
    shown = answered(asked, "3", done=False)
    assert [m["tool_call_id"] for m in shown] == [call_id(2, i) for i in range(3)]
    assert [m["content"][:20] for m in shown] == [
        "error: there is no t",
        "3",
        "error: the tool call",
    ]
    assert shown[1]["name"] == "add"


def test_a_message_without_calls_goes_to_the_environment_and_one_of_bad_calls_does_not():
    tools = ToolSet([ADD])
    assert ToolAction.read(tool_turn(_parsed(), 2, tools).action) == ToolAction("ok")
    bad = tool_turn(_parsed(("add", "{}")), 2, tools)
    assert bad.action is None
    assert bad.errors[0]["tool_call_id"] == call_id(2, 0)


@pytest.mark.parametrize(
    "observation",
    [
        "one text for two calls",
        [Message(role="tool", content="3", tool_call_id=call_id(2, 0))],
        [Message(role="tool", content="3", tool_call_id="other")],
        [Message(role="tool", content="3", tool_call_id=call_id(2, 0))] * 2,
    ],
)
def test_calls_that_the_environment_does_not_answer_are_its_fault(observation):
    call = ("add", '{"a": 1, "b": 2}')
    asked = tool_turn(_parsed(call, call), 2, ToolSet([ADD]))
    with pytest.raises(ValueError, match="call"):
        answered(asked, observation, done=False)


def test_calls_that_a_server_took_apart_are_checked():
    def call(i, arguments):
        return {"id": i, "type": "function", "function": {"name": "add", "arguments": arguments}}

    parsed = checked_calls("ok", [call("x", '{"a": 1}'), call("y", "{"), call("z", "")])
    assert [c["id"] for c in parsed.calls] == ["x", "z"]
    assert len(parsed.errors) == 1


class Waiting(ToolEnv):
    """Tools that wait, on one loop, so that what one call opens another may use."""

    def __init__(self):
        super().__init__()
        self.opened = None

    def begin(self, task, split, seed):
        return "go"

    def said(self, content):
        return ToolResult("", done=True)

    @tool
    async def open(self) -> str:
        """Open a queue."""
        self.opened = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        asyncio.get_running_loop().call_soon(self.opened.put_nowait, "from the first call")
        return "opened"

    @tool
    async def take(self, word: str = "") -> ToolResult:
        """Wait for the first call."""
        if self.opened is None:
            raise ToolError("open it first")
        same = asyncio.get_running_loop() is self.loop
        return ToolResult(f"{await self.opened.get()}{word} {same}", reward=1.0)

    @tool
    async def crash(self) -> str:
        await asyncio.sleep(0)
        raise KeyError("a bug")


def test_a_tool_may_be_a_coroutine_function():
    env = Waiting()
    env.reset()
    assert [spec["function"]["name"] for spec in env.tools()] == ["open", "take", "crash"]
    early, *_ = _step(env, ("take", {}))
    assert early[0]["content"] == "error: open it first"
    said, reward, *_ = _step(env, ("open", {}), ("take", {"word": "!"}), ("take", {"word": 1}))
    assert [m["content"] for m in said[:2]] == ["opened", "from the first call! True"]
    assert said[2]["content"].startswith("error: wrong arguments for take")
    assert reward == 1.0
    with pytest.raises(KeyError, match="a bug"):
        _step(env, ("crash", {}))
