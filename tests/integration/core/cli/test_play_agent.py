"""A person is the model of an agent environment."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request

import pytest
import typer
from typer.testing import CliRunner

from rollart_core.cli import build_app
from rollart_core.contracts.agent import AgentResult, AgentStart

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}


class AddsUp:
    """Lets the model call a tool that adds, and is content with a sum of 5."""

    async def prepare(self, *, seed, options):
        self.total = 0
        return AgentStart(f"Reach 5, task {options['task']}.")

    async def run(self, endpoint):
        messages = [{"role": "user", "content": "Go on."}]
        while self.total < 5:
            message = await asyncio.to_thread(ask, endpoint, messages)
            messages.append(message)
            for call in message.get("tool_calls") or ():
                self.total += json.loads(call["function"]["arguments"])["a"]
                said = {"role": "tool", "tool_call_id": call["id"], "content": str(self.total)}
                messages.append(said)

    async def finish(self, recorded):
        return AgentResult(float(self.total == 5), self.total == 5, {"asked": recorded.num_turns})

    def close(self):
        pass


class AsksTwiceAtOnce(AddsUp):
    """Has two conversations at the same time."""

    async def run(self, endpoint):
        told = [[{"role": "user", "content": name}] for name in ("Left", "Right")]
        asked = (asyncio.to_thread(ask, endpoint, messages) for messages in told)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        self.total = sum(isinstance(answer, dict) for answer in answers)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer


def ask(endpoint, messages):
    body = json.dumps({"messages": messages, "tools": [TOOL]}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as e:
        with e:
            raise RuntimeError(f"refused with {e.code}") from e


def played(monkeypatch: pytest.MonkeyPatch, *lines: str, env: str = "AddsUp") -> str:
    typed = iter(lines)

    def type_line(prompt: str = "") -> str:
        typer.echo("Prompt.")
        time.sleep(0.1 if env == "AsksTwiceAtOnce" else 0.0)  # for the other request to come
        line = next(typed, None)
        typer.echo(f"Typed {line}.")
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", type_line)
    arguments = ["play", f"test_play_agent:{env}", "--task", "3"]
    return CliRunner().invoke(build_app(), arguments, catch_exceptions=False).output


def test_a_person_answers_and_calls_tools(monkeypatch):
    shown = played(monkeypatch, "Hello", '/add {"a": 2}', '/add {"a": 3}')
    assert "Reach 5, task 3." in shown
    assert 'Tool: /add {"a": "integer"}' in shown
    assert shown.count("[user] Go on.") == 1
    assert "[tool] 2" in shown
    assert "Success.\nThe end. Return: 1" in shown


def test_who_leaves_is_judged_by_what_is_there(monkeypatch):
    shown = played(monkeypatch, '/add {"a": 2}')
    assert "The program ended: RuntimeError: refused with 400" in shown
    assert "asked: 1\nNo success.\nThe end. Return: 0" in shown


def test_requests_that_come_at_once_are_answered_one_after_the_other(monkeypatch):
    shown = played(monkeypatch, "one", "two", env="AsksTwiceAtOnce")
    steps = [line for line in shown.splitlines() if line.startswith(("Prompt", "Typed"))]
    assert steps == ["Prompt.", "Typed one.", "Prompt.", "Typed two."]
    assert "asked: 2" in shown


def test_who_leaves_is_not_asked_by_requests_that_waited(monkeypatch):
    shown = played(monkeypatch, env="AsksTwiceAtOnce")
    assert shown.count("Prompt.") == 1
    assert "asked: 0" in shown
