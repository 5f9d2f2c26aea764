"""``rollart play`` of an agent environment: its program asks, and the person answers as the model.

Takes: an agent task, and a terminal. Gives: one episode. Never: needs a model or the gateway.

A line is the model's whole answer. Where the program has declared tools, ``/NAME {"key": "value"}``
calls one. Ctrl-D refuses all that the program still asks, as a spent budget does; it is judged by
what it has left.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import typer

from rollart_core.contracts.agent import AgentTask, Recorded
from rollart_core.errors import UserError, first_line
from rollart_core.types import Message
from rollart_testing.endpoint import Json, RecordedRequest, ScriptedEndpoint, call_tool

_YOU_ARE_THE_MODEL = (
    "A program that owns its loop: you are the model that it asks. A line is an answer; /NAME "
    '{"key": "value"} calls a tool, where there are any; Ctrl-D refuses all further requests.\n'
)


def play_agent(task: AgentTask, options: Mapping[str, Any], seed: int) -> float:
    """Play one episode; return its reward."""
    with ScriptedEndpoint(_Person().answer) as server:
        return asyncio.run(_episode(task, server, options, seed))


@contextmanager
def refusals_told() -> Iterator[None]:
    """Turn the ValueError of a task or split that an environment refuses into a UserError."""
    try:
        yield
    except UserError:
        raise
    except ValueError as e:
        raise UserError(first_line(str(e)) or "the environment refuses this task") from e


class _Person:
    """Reads requests and types answers, one at a time: there is one terminal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_left = False
        self._shown: Sequence[Json] = ()

    def answer(self, asked: RecordedRequest) -> str | Json:
        """Show what is new of a request, and ask for the model's answer.

        Raises:
            EOFError: When the person leaves, or has left while the request waited.
        """
        with self._lock:
            if self._has_left:
                raise EOFError
            try:
                return self._typed(asked)
            except EOFError:
                self._has_left = True
                raise

    def _typed(self, asked: RecordedRequest) -> str | Json:
        known = len(self._shown) if [*asked.messages[: len(self._shown)]] == [*self._shown] else 0
        if self._shown and not known:
            typer.echo("(The program begins another conversation.)")
        for message in asked.messages[known:]:
            typer.echo(_line(message))
        for tool in asked.tools if not known else ():
            function = tool.get("function", {})
            typer.echo(f"Tool: /{function.get('name')} {json.dumps(_properties(function))}")
        said = input("> ")
        answer = _call(said, asked) if said.startswith("/") and asked.tools else said
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        self._shown = (*asked.messages, message)
        return answer


async def _episode(
    task: AgentTask, server: ScriptedEndpoint, options: Mapping[str, Any], seed: int
) -> float:
    with refusals_told():
        start = await task.prepare(seed=seed, options=options)
    typer.echo(f"{_YOU_ARE_THE_MODEL}\n{start.prompt}\n")
    try:
        await task.run(server.endpoint)
    except Exception as e:
        if not server.num_refused:
            raise
        typer.echo(f"The program ended: {type(e).__name__}: {e}")
    messages = tuple(cast("Message", dict(m)) for m in server.messages)
    spent = server.num_refused > 0
    result = await task.finish(Recorded(messages, len(server.asked), truncated=spent))
    for name, value in result.components.items():
        typer.echo(f"{name}: {value:g}")
    if result.success is not None:
        typer.echo("Success." if result.success else "No success.")
    return result.reward


def _line(message: Json) -> str:
    calls = "".join(
        f" /{call['function']['name']} {call['function']['arguments']}"
        for call in message.get("tool_calls") or ()
    )
    return f"[{message['role']}] {message.get('content') or ''}{calls}"


def _properties(function: Json) -> Json:
    properties: Json = function.get("parameters", {}).get("properties", {})
    return {name: said.get("type", "") for name, said in properties.items()}


def _call(said: str, asked: RecordedRequest) -> Json:
    name, _, arguments = said[1:].partition(" ")
    return call_tool(name, arguments.strip() or "{}", f"call_{asked.turn}")
