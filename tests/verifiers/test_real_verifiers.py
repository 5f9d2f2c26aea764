"""verifiers' own package: a taskset of its v1 API as agent tasks. `make verifiers` runs this."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollart_core
from rollart_core.contracts.agent import AgentResult, Recorded
from rollart_core.errors import ConfigError, EnvironmentFailure, PluginError, UnknownIdError
from rollart_core.plugins import registry
from rollart_testing import ScriptedEndpoint, assert_checks, check_agent
from rollart_testing.endpoint import Answer, call_tool

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(300),
    # verifiers' own, of tenacity, when it connects to a tool server
    pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning"),
]

ID = "verifiers::vf-sums"
OPTIONS: dict[str, Any] = {"path": str(Path(__file__).parent), "reward_range": [0.0, 1.0]}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool servers that verifiers starts find the taskset, as if it were installed."""
    monkeypatch.setenv("PYTHONPATH", OPTIONS["path"], prepend=os.pathsep)


def played(
    answer: Answer, max_requests: int | None = None, **options: Any
) -> tuple[AgentResult, ScriptedEndpoint]:
    """Play task 3 of the split train: what is 3 plus 3?"""
    task: Any = rollart_core.make(ID, **OPTIONS, **options)

    async def episode(server: ScriptedEndpoint) -> AgentResult:
        await task.prepare(seed=0, options={"split": "train", "task": 3})
        await task.run(server.endpoint)
        return await task.finish(Recorded())

    with ScriptedEndpoint(answer, max_requests=max_requests) as server:
        return asyncio.run(episode(server)), server


def test_the_taskset_keeps_the_contract() -> None:
    options = {**OPTIONS, "deterministic": True}
    spec = registry.env_spec(ID, options)
    assert (spec.kind, spec.splits) == ("agent", ("train", "test"))
    only = ["make", "prepare", "run", "finish", "tasks", "refused_requests", "ends_when_cancelled"]
    make: Any = partial(rollart_core.make, ID, **options)
    assert_checks(check_agent(make, spec=spec, num_tasks=1, only=[*only, "reward_in_range"]))


def test_the_reward_is_that_of_verifiers_and_the_program_asks_with_its_key() -> None:
    before = set(os.environ)
    right, server = played(lambda asked: " 6 ")
    wrong, _ = played(lambda asked: "seven")
    assert (right.reward, dict(right.components)) == (1.0, {"num_chars": 1.0, "right": 1.0})
    assert (wrong.reward, wrong.truncated) == (0.0, False)
    asked = [(m["role"], m["content"]) for m in server.asked[0].messages]
    assert asked == [("system", "Add."), ("user", "What is 3 plus 3?")]
    assert server.strangers == []
    assert set(os.environ) == before


def test_tools_are_declared_called_and_their_faults_told() -> None:
    said: list[str | dict[str, Any]] = [
        call_tool("nothing", {}),
        call_tool("adding_add", "{half"),
        call_tool("adding_add", {"a": 3, "b": 3}),
        "6",
    ]
    result, server = played(lambda asked: said[asked.turn], taskset={"tools": True})
    assert result.reward == 1.0
    replies = [json.dumps(m) for m in server.asked[-1].messages if m["role"] == "tool"]
    assert "there is no tool 'nothing'" in replies[0]
    assert "not JSON" in replies[1]
    assert '"6"' in replies[2]


def test_turns_are_bounded_and_what_there_is_is_judged() -> None:
    options = {"taskset": {"tools": True}, "max_turns": 2}
    result, server = played(lambda asked: call_tool("adding_add", {"a": 1, "b": 1}), **options)
    assert (result.truncated, len(server.asked)) == (True, 2)
    result, server = played(lambda asked: "6", max_requests=0)
    assert (result.reward, len(server.asked)) == (0.0, 0)


def test_an_endpoint_that_breaks_fails_the_episode() -> None:
    def breaks(asked: object) -> str:
        raise OSError("it is gone")

    with pytest.raises(EnvironmentFailure, match="verifiers: the episode failed"):
        played(breaks)


def test_splits_do_not_overlap_and_may_be_given() -> None:
    task: Any = rollart_core.make(ID, **OPTIONS)
    assert (task.num_tasks("train"), task.num_tasks("test")) == (8, 2)
    task = rollart_core.make(ID, **OPTIONS, splits={"train": [0, 3], "test": [3, 30]})
    assert (task.num_tasks("train"), task.num_tasks("test")) == (3, 7)
    with pytest.raises(ConfigError, match="overlap"):
        rollart_core.make(ID, **OPTIONS, splits={"train": [0, 3], "test": [2, 4]})


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UnknownIdError, match="no_such_taskset"):
        registry.env_spec("verifiers::no-such-taskset")
    with pytest.raises(PluginError, match="num_taks"):
        registry.env_spec(ID, {**OPTIONS, "taskset": {"num_taks": 3}})
    with pytest.raises(PluginError, match="no_harness"):
        registry.env_spec(ID, {**OPTIONS, "harness": {"id": "no-harness"}})
    with pytest.raises(ConfigError, match="does not exist"):
        registry.env_spec(ID, {"path": "/no/such/folder"})
