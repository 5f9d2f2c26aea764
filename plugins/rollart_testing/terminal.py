"""``rollart play``: play an environment in the terminal.

Takes: an environment, a task, typed actions. Gives: its observations and rewards, and the expert's
action for ``?``. Never: needs a model: in an agent environment the user is the model.

An agent environment's program sends requests to an endpoint, and the user answers. Each line is a
whole response. If the program has declared tools, ``/NAME {"key": "value"}`` calls one. Ctrl-D
refuses all further requests, like a spent budget; then the program is scored.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, cast

import typer

from rollart_core.cli.options import as_options, check_split
from rollart_core.contracts.agent import AgentTask, Recorded
from rollart_core.errors import UserError, first_line
from rollart_core.plugins import registry
from rollart_core.types import Message, Observation
from rollart_testing.endpoint import Json, RecordedRequest, ScriptedEndpoint, call_tool

_HINT = "?"
_CALL = 'A call: {"tool_calls": [{"name": ..., "arguments": {...}}]}'
_YOU_ARE_THE_MODEL = (
    "An agent program: you are the model that it calls. Each line is a response; /NAME "
    '{"key": "value"} calls a tool, if there are any; Ctrl-D refuses all further requests.\n'
)


def play(
    env: Annotated[
        str, typer.Argument(help="An id, an alias, module:Class or ADAPTER::FOREIGN_ID.")
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the environment."),
    ] = None,
    task: Annotated[int, typer.Option(min=0, help="Index of the task.")] = 0,
    split: Annotated[str, typer.Option(help="Split of the task.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the episode.")] = 0,
) -> None:
    """Play an environment in the terminal. In an agent environment, you act as the model."""
    given = as_options(options or [])
    check_split(env, given, split)
    made: Any = registry.make(env, **given)
    chosen = {"task": task, "split": split}
    try:
        if callable(getattr(made, "prepare", None)):
            total = _play_agent(made, chosen, seed)
        else:
            total = _episode(made, chosen, seed)
    except EOFError:
        typer.echo("\nLeft before the end.")
        return
    finally:
        made.close()
    typer.echo(f"The end. Return: {total:g}")


def _episode(env: Any, options: dict[str, Any], seed: int) -> float:
    """Play to the end and return the sum of the rewards."""
    with _refusals_told():
        observation, info = env.reset(seed=seed, options=options)
    typer.echo(f"Type an action; {_HINT} shows the expert's action; Ctrl-D ends.\n")
    total, over = 0.0, False
    if info.get("tools"):
        names = [tool["function"]["name"] for tool in info["tools"]]
        typer.echo(f"Tools: {', '.join(names)}. {_CALL}\n")
    while not over:
        typer.echo(_text(observation))
        if info.get("available_actions"):
            typer.echo(f"Actions: {', '.join(map(str, info['available_actions']))}")
        action = input("> ")
        if action == _HINT:
            typer.echo(f"The expert's action: {_advice(env)}\n")
            continue
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        over = bool(terminated or truncated)
        typer.echo(f"Reward: {float(reward):g}\n")
    typer.echo(_text(observation))
    if "success" in info:
        typer.echo("Success." if info["success"] else "No success.")
    return total


def _advice(env: Any) -> str:
    return str(env.oracle()) if hasattr(env, "oracle") else "none (it has no oracle())"


def _text(observation: Observation) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"[{m['role']}] {m['content']}" for m in observation)


def _play_agent(task: AgentTask, options: Mapping[str, Any], seed: int) -> float:
    """Play one episode; return its reward."""
    with ScriptedEndpoint(_Person().answer) as server:
        return asyncio.run(_agent_episode(task, server, options, seed))


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Turn the ValueError of a task or split that an environment refuses into a UserError."""
    try:
        yield
    except UserError:
        raise
    except ValueError as e:
        raise UserError(first_line(str(e)) or "the environment refuses this task") from e


class _Person:
    """Shows requests and reads responses, one at a time, on the single terminal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_left = False
        self._shown: Sequence[Json] = ()

    def answer(self, asked: RecordedRequest) -> str | Json:
        """Show the new messages of a request, and read the model's response.

        Raises:
            EOFError: If the user quits, or has quit while the request waited.
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


async def _agent_episode(
    task: AgentTask, server: ScriptedEndpoint, options: Mapping[str, Any], seed: int
) -> float:
    with _refusals_told():
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
