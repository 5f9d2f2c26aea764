"""How a model is asked to fix a function, and what it answers.

Takes: a task, or a model's answer. Gives: the prompt, the function that an answer stands for, and
the answer that stands for a function. Never: runs code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rollart_envs.swe.function_task import FunctionTask, candidate_of

_LINE = re.compile(r"(\d{1,6}) +(\S.*)")


class AnswerForm(Protocol):
    """A form of answers."""

    ask: ClassVar[str]
    """The last line of a prompt."""

    def statement(self, task: FunctionTask) -> str:
        """Return the prompt of a task."""

    def candidate(self, task: FunctionTask, answer: str) -> str | None:
        """Return the function that an answer stands for; None if it stands for none."""

    def answer(self, task: FunctionTask, code: str) -> str:
        """Return the answer that stands for a function."""


@dataclass(frozen=True, slots=True)
class WholeFunction:
    """The answer is the whole function, in a fenced block."""

    ask: ClassVar[str] = "Answer with the whole mended function in one ```python block.\n"

    def statement(self, task: FunctionTask) -> str:
        """Return the prompt of a task."""
        return f"{task.statement()}\n{self.ask}"

    def candidate(self, task: FunctionTask, answer: str) -> str | None:
        """Return the source in the answer."""
        return candidate_of(answer)

    def answer(self, task: FunctionTask, code: str) -> str:
        """Return the function in a fenced block."""
        return f"```python\n{code.strip()}\n```"


@dataclass(frozen=True, slots=True)
class OneLine:
    """The answer replaces the code of one line: ``5 total += n`` is line 5, from 1.

    The line keeps its indentation and its comment. An answer of a few tokens lets small models
    learn which line is wrong and how it has to be, instead of how to copy a function.
    """

    ask: ClassVar[str] = "Answer: LINE CODE\n"

    def statement(self, task: FunctionTask) -> str:
        """Return the purpose, the numbered lines, and the call that shows the bug."""
        lines = enumerate(_lines(task.buggy_code), 1)
        numbered = "\n".join(f"{number} {line}" for number, line in lines)
        return f"{task.instruction}\n{numbered}\n{task.example}\n{self.ask}"

    def candidate(self, task: FunctionTask, answer: str) -> str | None:
        """Return the function with the line replaced."""
        found = _LINE.fullmatch(answer.strip())
        lines = _lines(task.buggy_code)
        if found is None or not 1 <= int(found[1]) <= len(lines):
            return None
        code, mark, comment = lines[int(found[1]) - 1].partition("  #")
        indent = code[: len(code) - len(code.lstrip())]
        lines[int(found[1]) - 1] = f"{indent}{found[2]}{mark}{comment}"
        return "\n".join(lines) + "\n"

    def answer(self, task: FunctionTask, code: str) -> str:
        """Return the replacement; empty if no single line gives the function."""
        pairs = enumerate(zip(_lines(task.buggy_code), _lines(code), strict=False), 1)
        changed = [(number, new) for number, (old, new) in pairs if old != new]
        if len(changed) != 1:
            return ""
        number, new = changed[0]
        answer = f"{number} {new.partition('  #')[0].strip()}"
        return answer if self.candidate(task, answer) == code else ""


WHOLE_FUNCTION = WholeFunction()
ONE_LINE = OneLine()


def _lines(source: str) -> list[str]:
    return source.rstrip().split("\n")
