"""Calls that nobody chose."""

import random
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field
from support.tool_templates import ADD

from rollart_core.rollout.tools.draw import drawn_call, edge_calls
from rollart_core.rollout.tools.env import ToolEnv, tool
from rollart_core.rollout.tools.tool_set import ToolSet


class Place(BaseModel):
    row: int
    name: str | None = None


class Odd(ToolEnv):
    def begin(self, task, split, seed):
        return "go"

    def said(self, content):
        raise NotImplementedError

    @tool
    def put(self, at: Place, sizes: list[int], how: Literal["up", "down"] = "up") -> str:
        return ""

    @tool
    def take(
        self,
        much: Annotated[float, Field(ge=0.5, le=2)],
        few: Annotated[int, Field(gt=3, lt=6)] | None = None,
        word: Annotated[str, Field(min_length=20)] = "x" * 20,
    ) -> str:
        return ""

    @tool
    def look(self) -> str:
        return ""


TOOLS = Odd().tools()


def edges(name, argument):
    return [c.arguments.get(argument) for c in edge_calls(TOOLS) if c.name == name]


def test_each_argument_takes_each_edge_and_each_tool_comes_at_once():
    calls = edge_calls(TOOLS)
    assert [c.name for c in calls[:3]] == ["put", "take", "look"]
    assert [c.name for c in calls].count("look") == 1
    assert {0, -1, 1} <= {at["row"] for at in edges("put", "at")}
    assert {None, ""} <= {at.get("name") for at in edges("put", "at")}
    assert [] in edges("put", "sizes")
    assert {"up", "down", None} == set(edges("put", "how"))
    assert set(edges("take", "much")) == {0.5, 1, 1.5, 2}
    assert {4, 5, None} <= set(edges("take", "few"))
    assert "x" * 20 in edges("take", "word")
    assert {0, -1, 1} <= {c.arguments["a"] for c in edge_calls([ADD])}


@pytest.mark.parametrize("seed", range(30))
def test_calls_fit_their_schemas(seed):
    known = ToolSet(TOOLS)
    call = drawn_call(random.Random(seed), TOOLS, lambda: "some words and more of them")
    for one in (call, *edge_calls(TOOLS)):
        assert known.problem(one.name, one.arguments) is None, one


def test_a_schema_within_itself_ends():
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    spec = {"type": "function", "function": {"name": "f", "parameters": tree}}
    assert edge_calls([spec])
    assert drawn_call(random.Random(0), [spec], str).name == "f"
