"""``rollart play``: play an environment in the terminal.

Takes: an environment, a task, typed actions. Gives: its observations and rewards, and the expert's
action for ``?``. Never: needs a model: in an agent environment the user is the model.

A line is an action. An action of several lines is a fenced block, the lines after ``<<END`` up to
``END``, or the text of an editor. If tools are declared, ``/NAME {"key": "value"}`` calls one.

An agent environment's program sends requests to an endpoint, and the user answers. Ctrl-D refuses
all further requests, like a spent budget; then the program is scored.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import typer

from rollart_core.cli.options import as_options, check_split
from rollart_core.contracts.agent import AgentTask, Recorded
from rollart_core.errors import UserError, first_line
from rollart_core.plugins import registry
from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.types import Message, Observation
from rollart_testing.endpoint import Json, RecordedRequest, ScriptedEndpoint, call_tool

_HINT = "?"
_EDIT = "!edit"
_PROMPT, _MORE = "> ", ". "
_FENCE = re.compile(r"(`{3,})[^`]*")
_HEREDOC = re.compile(r"<<\s*(\w+)\s*")
_INPUT = """\
A line is {what}. For several lines, use one of these:
  ```        a fenced block, until it is closed
  <<END      the lines until a line END (or another word)
  {edit}      a text editor ($VISUAL or $EDITOR), with the previous text
  /NAME {{"key": "value"}}   calls a tool, if there are any
{keys}
"""
_AS_ACTION = _INPUT.format(
    what="an action", edit=_EDIT, keys=f"{_HINT} shows the expert's action; Ctrl-D ends."
)
_YOU_ARE_THE_MODEL = "An agent program: you are the model that it calls.\n" + _INPUT.format(
    what="a response", edit=_EDIT, keys="Ctrl-D refuses all further requests."
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
    typer.echo(_AS_ACTION)
    total, over = 0.0, False
    tools: Sequence[Json] = info.get("tools") or ()
    for tool in tools:
        typer.echo(_tool_line(tool))
    keyboard = _Keyboard()
    while not over:
        typer.echo(_text(observation))
        if info.get("available_actions"):
            typer.echo(f"Actions: {', '.join(map(str, info['available_actions']))}")
        action = _action(env, keyboard, calls=bool(tools))
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        over = bool(terminated or truncated)
        typer.echo(f"Reward: {float(reward):g}\n")
    typer.echo(_text(observation))
    if "success" in info:
        typer.echo("Success." if info["success"] else "No success.")
    return total


def _action(env: Any, keyboard: _Keyboard, *, calls: bool) -> str:
    """Read texts until one is an action.

    An environment may have a method ``typed_action(text) -> str``, for texts that people type.
    """
    convert = getattr(env, "typed_action", None)
    while True:
        typed = keyboard.read()
        if typed == _HINT:
            typer.echo(f"The expert's action: {_advice(env)}\n")
        elif not (calls and typed.startswith("/")):
            return str(convert(typed)) if callable(convert) else typed
        elif (call := _typed_call(typed)) is not None:
            return ToolAction("", (call,)).text()


def _typed_call(typed: str) -> Call | None:
    """Return the call in a text such as ``/find {"word": "red"}``; None if it is not valid."""
    name, _, given = typed[1:].partition(" ")
    try:
        arguments = json.loads(given.strip() or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("it must be an object")
    except ValueError as e:
        typer.echo(f'Not sent: the arguments are not JSON: {e}. Type /{name} {{"key": "value"}}.')
        return None
    return Call(name, arguments, "call_typed")


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


class _Keyboard:
    """Reads texts of one or more lines; ``input`` keeps a history, where there is readline."""

    def __init__(self) -> None:
        with suppress(ImportError):  # it is not on every platform
            importlib.import_module("readline")
        self._last = ""

    def read(self) -> str:
        """Return the next text. Ctrl-C or the end of the input within a text drops the text.

        Raises:
            EOFError: If the input is at its end.
        """
        while True:
            text = self._text(input(_PROMPT))
            if text is not None:
                self._last = text if text != _HINT else self._last
                return text

    def _text(self, first: str) -> str | None:
        """Return the text that begins with a line; None if there is none after all."""
        if first.strip() == _EDIT:
            return _edited(self._last)
        if heredoc := _HEREDOC.fullmatch(first):
            lines = self._until(heredoc[1])
            return None if lines is None else "\n".join(lines[:-1])
        if fence := _FENCE.fullmatch(first):
            lines = self._until(fence[1])
            return None if lines is None else "\n".join((first, *lines))
        return first

    def _until(self, end: str) -> list[str] | None:
        """Return the lines up to the one that is ``end``."""
        lines = list[str]()
        while not lines or lines[-1].rstrip() != end:
            try:
                lines.append(input(_MORE))
            except (EOFError, KeyboardInterrupt):
                typer.echo(f"\nNot sent: there was no line {end} at its end.")
                return None
        return lines


def _edited(text: str) -> str | None:
    """Return the text after an edit; None if the editor failed or nothing is left."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with TemporaryDirectory() as folder:
        file = Path(folder, "action.md")
        file.write_text(text, encoding="utf-8")
        try:
            code = subprocess.run((*shlex.split(editor), file), check=False).returncode
            said = file.read_text(encoding="utf-8").rstrip("\n")
        except (OSError, ValueError) as e:
            typer.echo(f"The editor {editor!r} failed: {e}. Set EDITOR, such as EDITOR=nano.")
            return None
    if code != 0 or not said.strip():
        why = f"{editor} ended with exit code {code}" if code else "the text is empty"
        typer.echo(f"Not sent: {why}.")
        return None
    typer.echo(said)
    return said


class _Person:
    """Shows requests and reads responses, one at a time, on the single terminal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_left = False
        self._shown: Sequence[Json] = ()
        self._keyboard = _Keyboard()

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
            typer.echo(_tool_line(tool))
        said = self._keyboard.read()
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


def _tool_line(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", {})
    return f"Tool: /{function.get('name')} {json.dumps(_properties(function))}"


def _properties(function: Json) -> Json:
    properties: Json = function.get("parameters", {}).get("properties", {})
    return {name: said.get("type", "") for name, said in properties.items()}


def _call(said: str, asked: RecordedRequest) -> Json:
    name, _, arguments = said[1:].partition(" ")
    return call_tool(name, arguments.strip() or "{}", f"call_{asked.turn}")
