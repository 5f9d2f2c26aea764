"""Function-repair tasks, in HumanEvalPack's format: one buggy function, hidden tests.

Takes: one row. Gives: a :class:`FunctionTask`: the part the agent sees, the hidden part, and the
test that judges. Never: runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollart_envs.rows import RowError
from rollart_sandboxes.judging.functions import HiddenTest

_FENCED = re.compile(r"^[ \t]*```[\w+-]*[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """One function with a bug."""

    task_id: str
    entry_point: str
    declaration: str
    """Imports, helpers and the line with ``def``."""
    buggy_solution: str
    """The body that the agent gets."""
    canonical_solution: str
    test: str
    """Source that defines ``check`` and calls it."""
    instruction: str
    bug_type: str = ""

    @property
    def buggy_code(self) -> str:
        """The whole function with its bug."""
        return self.declaration + self.buggy_solution

    @property
    def gold_code(self) -> str:
        """The whole function, fixed."""
        return self.declaration + self.canonical_solution

    def statement(self) -> str:
        """Return the prompt: the purpose of the function and its current source."""
        return (
            f"{self.instruction.strip()}\n\n"
            f"The function `{self.entry_point}` below has a bug. Mend it.\n\n"
            f"```python\n{self.buggy_code.strip()}\n```\n"
        )

    def secrets(self) -> tuple[str, ...]:
        """Return the texts that the agent must never read: the hidden test and the fixed body.

        The body is included only if it is not part of the statement.
        """
        seen = self.statement()
        return tuple(
            text
            for text in (self.test.strip(), self.canonical_solution.strip())
            if text and text not in seen
        )

    @property
    def hidden(self) -> HiddenTest:
        """The test that judges an answer."""
        return HiddenTest(self.entry_point, self.test, self.gold_code)


def function_task(row: Mapping[str, object]) -> FunctionTask:
    """Return the task in a row.

    Raises:
        RowError: If a field is missing, empty or of the wrong type, or a source does not compile.
    """
    task = FunctionTask(
        task_id=_text(row, "task_id"),
        entry_point=_text(row, "entry_point"),
        declaration=_text(row, "declaration"),
        buggy_solution=_text(row, "buggy_solution"),
        canonical_solution=_text(row, "canonical_solution"),
        test=_text(row, "test"),
        instruction=_text(row, "instruction"),
        bug_type=str(row.get("bug_type") or ""),
    )
    if not re.search(rf"^def {re.escape(task.entry_point)}\b", task.declaration, re.MULTILINE):
        raise RowError("declaration", f"does not define the entry point {task.entry_point!r}")
    for name, code in (("canonical_solution", task.gold_code), ("test", task.test)):
        try:
            compile(code, "<row>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise RowError(name, f"is not Python: {error}") from None
    return task


def candidate_of(answer: str) -> str:
    """Return the source in a model's answer: its last fenced block, or the whole answer."""
    blocks = _FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer


def _text(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise RowError(name, "is missing")
    if not isinstance(value, str) or not value.strip():
        raise RowError(name, f"is {value!r:.60}; it must be a text that is not empty")
    return value
