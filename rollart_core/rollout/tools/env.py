"""Environments whose actions are tool calls, of methods marked with :func:`tool` or of sources.

    class Adding(ToolEnv):
        def begin(self, task, split, seed):
            return "What is 1 + 2?"

        @tool
        def add(self, a: int, b: int) -> str:
            '''Add two whole numbers.'''
            return str(a + b)

        def said(self, content):
            return ToolResult("", reward=float("3" in content), done=True)

Takes: actions in the format of :class:`~rollart_core.rollout.tools.action.ToolAction`. Gives: a
gymnasium environment that declares its tools in ``info["tools"]`` of ``reset`` and answers each
call with a ``tool`` message. Never: depends on the format in which a model writes calls.
"""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_type_hints

import gymnasium
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rollart_core.errors import first_line, text_of
from rollart_core.rollout import loop
from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.source import ToolError, ToolResult, ToolSource
from rollart_core.spaces import Messages, Text
from rollart_core.types import FunctionSpec, Message, Observation, ToolSpec

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "__rollart_tool__"
_PREFIX = "arg_"


def tool(method: _F) -> _F:
    """Mark a method as a tool.

    The policy gets the method's name, the first paragraph of its docstring and its annotated
    parameters. The method, which may be a coroutine function, returns text or a
    :class:`ToolResult`. If it raises :class:`ToolError`, the policy gets the message; any other
    error fails the episode. Coroutines of all environments in a process run on one event loop.

    Raises:
        TypeError: If a parameter has no annotation, or is ``*args`` or ``**kwargs``.
    """
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.annotation is parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(f"tool {method.__name__}: annotate parameter {parameter.name}")
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True, slots=True)
class _Own:
    """A tool that is a method."""

    spec: ToolSpec
    run: Callable[..., Any]
    arguments: type[BaseModel]


class ToolEnv(gymnasium.Env[Observation, str]):
    """Base class of environments with tools; see the module docstring.

    Args:
        sources: Sources of further tools; closed with the environment.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(self, sources: Sequence[ToolSource] = ()) -> None:
        self.observation_space = Messages()
        self.action_space = Text()
        self._sources = tuple(sources)
        self._own = {o.spec["function"]["name"]: o for o in _methods(self)}

    @abstractmethod
    def begin(self, task: int, split: str, seed: int | None) -> str | list[Message]:
        """Start the task and return the first observation."""

    @abstractmethod
    def said(self, content: str) -> ToolResult:
        """Handle a message without calls, such as the final answer."""

    def tools(self) -> list[ToolSpec]:
        """Return the tools of the current task."""
        others = [spec for source in self._sources for spec in source.tools()]
        return [*(own.spec for own in self._own.values()), *others]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode; ``info["tools"]`` contains its tools."""
        super().reset(seed=seed)
        options = options or {}
        first = self.begin(int(options.get("task", 0)), str(options.get("split", "train")), seed)
        shown = [Message(role="user", content=first)] if isinstance(first, str) else first
        return shown, {"tools": self.tools()}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make the calls in order; calls after the end of the episode are not made."""
        asked = ToolAction.read(action)
        if not asked.calls:
            result = self.said(asked.content)
            shown: list[Message] = [Message(role="user", content=result.content)]
            return _stepped(shown, [result])
        results: list[ToolResult] = []
        for call in asked.calls:
            over = any(result.done for result in results)
            results.append(ToolResult("the episode is over") if over else self._result(call))
        answers = [
            Message(role="tool", content=result.content, tool_call_id=call.id, name=call.name)
            for call, result in zip(asked.calls, results, strict=True)
        ]
        return _stepped(answers, results)

    def close(self) -> None:
        """Close the tool sources; may be called twice."""
        for source in self._sources:
            source.close()

    def _result(self, call: Call) -> ToolResult:
        try:
            answer = self._made(call)
        except ToolError as e:
            return ToolResult(f"error: {text_of(e)}")
        return answer if isinstance(answer, ToolResult) else ToolResult(str(answer))

    def _made(self, call: Call) -> str | ToolResult:
        own = self._own.get(call.name)
        if own is not None:
            try:  # as JSON, so that a list is accepted as a tuple and text as a date
                given = own.arguments.model_validate_json(json.dumps(dict(call.arguments)))
            except ValidationError as e:
                raise ToolError(f"wrong arguments for {call.name}: {_first(e)}") from e
            named = {
                key.removeprefix(_PREFIX): getattr(given, key) for key in own.arguments.model_fields
            }
            answer: Any = own.run(**named)
            waits = inspect.iscoroutine(answer)
            return loop.run(answer) if waits else answer  # type: ignore[no-any-return]
        for source in self._sources:
            if any(spec["function"]["name"] == call.name for spec in source.tools()):
                return source.call(call.name, call.arguments)
        raise ToolError(f"there is no tool {call.name!r}")


def _stepped(
    shown: list[Message], results: list[ToolResult]
) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    info: dict[str, Any] = {}
    told = [result.success for result in results if result.success is not None]
    if told:
        info["success"] = told[-1]
    components: dict[str, float] = {}
    for result in results:
        components.update(result.components)
    if components:
        info["reward_components"] = components
    done = any(result.done for result in results)
    return shown, sum(result.reward for result in results), done, False, info


def _methods(env: object) -> list[_Own]:
    """Return the methods marked as tools, in the order of their definition."""
    names = dict.fromkeys(
        name
        for kind in reversed(type(env).__mro__)
        for name, member in vars(kind).items()
        if getattr(member, _MARK, False)
    )
    return [_own(getattr(env, name)) for name in names]


def _own(method: Callable[..., Any]) -> _Own:
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {  # by alias, for names that pydantic reserves (json, copy)
        _PREFIX + p.name: (
            hints[p.name],
            Field(... if p.default is p.empty else p.default, alias=p.name),
        )
        for p in inspect.signature(method).parameters.values()
    }
    name = method.__name__
    arguments = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    function = FunctionSpec(
        name=name,
        description=" ".join((inspect.getdoc(method) or "").split("\n\n")[0].split()),
        parameters=_untitled(arguments.model_json_schema()),
    )
    return _Own(ToolSpec(type="function", function=function), method, arguments)


def _untitled(schema: Any) -> Any:
    """Return the schema without the titles that pydantic derives from names, to save tokens."""
    if isinstance(schema, list):
        return [_untitled(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {n: _untitled(v) for n, v in value.items()}
        if key == "properties"
        else _untitled(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


def _first(error: ValidationError) -> str:
    """Return the first problem in one line."""
    problem = error.errors(include_url=False)[0]
    where = "".join(f"{at}: " for at in problem["loc"])
    return first_line(f"{where}{problem['msg']}")
