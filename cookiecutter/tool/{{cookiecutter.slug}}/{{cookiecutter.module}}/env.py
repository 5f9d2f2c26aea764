"""The environment: the policy looks up the team of a person with a tool, and answers with it.

Each method with `@tool` is a tool. The policy gets its name, the first paragraph of its docstring
and its parameters. RollArt checks the arguments of a call before it reaches the method.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from rollart_core.rollout.tools import Call, ToolAction, ToolEnv, ToolError, ToolResult, tool

from {{ cookiecutter.module }}.config import {{ cookiecutter.base }}Config
from {{ cookiecutter.module }}.directory import Request, draw_request

NUM_TASKS = {"train": 10_000, "test": 1_000}


class {{ cookiecutter.class_name }}(ToolEnv):
    """A directory of people.

    Args:
        options: The fields of {{ cookiecutter.base }}Config.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = {{ cookiecutter.base }}Config(**options)
        self._request: Request | None = None
        self._found = False

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        if split not in NUM_TASKS:
            raise ValueError(f"split {split!r} is not one of {', '.join(NUM_TASKS)}")
        return NUM_TASKS[split]

    def begin(self, task: int, split: str, seed: int | None) -> str:
        """Start a task and return the first observation."""
        if not 0 <= task < self.num_tasks(split):
            raise ValueError(f"task {task} is not in split {split!r} of {self.num_tasks(split)}")
        self._request = draw_request(split, task, self.config.people)
        self._found = False
        return f"request {self._request.number}: team of {self._request.name}?"

    # A tool that waits, such as one that calls a server, may be `async def`.
    @tool
    def find(self, name: Annotated[str, Field(description="A first name.")]) -> str:
        """Look up the team of a person."""
        assert self._request is not None
        if name not in self._request.teams:
            raise ToolError(f"there is no {name!r}")  # the policy reads it and may try again
        self._found = self._found or name == self._request.name
        return self._request.teams[name]

    def said(self, content: str) -> ToolResult:
        """Score a message without calls: the answer, which ends the episode."""
        assert self._request is not None
        right = content.strip() == self._request.answer
        return ToolResult("", reward=float(right), done=True, success=right)

    def oracle(self) -> str | None:
        """Return the expert's next action, for warm starts and checks."""
        if self._request is None:
            return None
        if self._found:
            return ToolAction(self._request.answer).text()
        return ToolAction("", (Call("find", {"name": self._request.name}),)).text()
