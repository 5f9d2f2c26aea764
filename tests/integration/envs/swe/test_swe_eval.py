"""``rollart eval --env repair`` with no settings but the sandbox, on a server."""

from __future__ import annotations

import json
import re

import pytest
from support.sandbox_types import no_bubblewrap
from typer.testing import CliRunner

from rollart_core.cli import build_app
from rollart_envs.swe.repair_episode import expert_commands, fenced
from rollart_envs.swe.taskbook import own_file, repair_tasks
from rollart_testing.endpoint import RecordedRequest, ScriptedEndpoint, call_tool

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(no_bubblewrap()), reason=no_bubblewrap() or "bubblewrap"),
]


def engineer(asked: RecordedRequest):
    """Apply the gold patch and submit: in blocks, or with calls if there are tools."""
    tasks = repair_tasks(own_file("repair_tasks.jsonl")).tasks.values()
    told = str(asked.messages[0]["content"]) + str(asked.messages[-1]["content"])
    repo = re.search(r"The repository (\S+) lies in", told)
    assert repo is not None
    task = next(task for task in tasks if task.repo == repo[1])
    turn = sum(message["role"] == "assistant" for message in asked.messages)
    command = [*expert_commands(task), "submit"][turn]
    if not asked.tools:
        return fenced("bash", command)
    is_end = command == "submit"
    return call_tool("submit", {}) if is_end else call_tool("bash", {"command": command})


@pytest.mark.parametrize(
    ("tools", "settings", "num"),
    [
        ("false", [], 2),  # the one task of the split, sampled and greedy
        ("true", ["evaluation.split=all", "evaluation.greedy=false"], 5),
    ],
)
def test_it_works_with_its_defaults(tmp_path, monkeypatch, tools, settings, num):
    with ScriptedEndpoint(engineer) as server:
        monkeypatch.setenv("OPENAI_API_KEY", server.endpoint.api_key)
        out = tmp_path / "eval"
        url = server.endpoint.base_url
        command = ["eval", "--env", "repair", "--model", url, "--out", str(out)]
        given = [*command, "env.sandbox=bubblewrap", f"env.tools={tools}", *settings]
        done = CliRunner().invoke(build_app(), given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == num
    assert {(e["status"], e["success"]) for e in episodes} == {("finished", True)}
