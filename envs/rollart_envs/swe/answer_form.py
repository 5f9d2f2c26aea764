"""How a model is asked to fix a function, and what it answers.

Takes: a task, or a model's answer. Gives: the prompt, the function that an answer stands for, and
the answer that stands for a function. Never: runs code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rollart_envs.swe.function_task import FunctionTask, candidate_of

_PIECE = r"\w+|[-+*/%<>=!]+"
_TOKEN = re.compile(rf"({_PIECE})")
"""A name, a keyword, a number or an operator."""
_EDIT = re.compile(rf"(\d{{1,6}}) ({_PIECE}) to ({_PIECE})")


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
class OneToken:
    """The answer replaces one token: ``4 > to >=`` is line 4, from 1, with ``>=`` for ``>``.

    An answer of a few tokens lets small models learn which token is wrong, instead of how to copy a
    function. The line must have the old token exactly once.
    """

    ask: ClassVar[str] = "Answer: LINE OLD to NEW.\n"

    def statement(self, task: FunctionTask) -> str:
        """Return the purpose, the numbered lines, and the call that shows the bug."""
        lines = enumerate(_lines(task.buggy_code), 1)
        numbered = "\n".join(f"{number} {line}" for number, line in lines)
        return f"{task.instruction}\n{numbered}\n{task.example}\n{self.ask}"

    def candidate(self, task: FunctionTask, answer: str) -> str | None:
        """Return the function after the replacement."""
        found = _EDIT.fullmatch(answer.strip())
        lines = _lines(task.buggy_code)
        if found is None or not 1 <= int(found[1]) <= len(lines):
            return None
        code, mark, comment = lines[int(found[1]) - 1].partition("#")
        tokens = _TOKEN.split(code)
        if tokens.count(found[2]) != 1:
            return None
        tokens[tokens.index(found[2])] = found[3]
        lines[int(found[1]) - 1] = "".join((*tokens, mark, comment))
        return "\n".join(lines) + "\n"

    def answer(self, task: FunctionTask, code: str) -> str:
        """Return the replacement; empty if no single replacement gives the function.

        An operator at the end has the space that follows it in code, so that small tokenizers have
        one token for both.
        """
        pairs = enumerate(zip(_lines(task.buggy_code), _lines(code), strict=False), 1)
        changed = [(number, old, new) for number, (old, new) in pairs if old != new]
        if len(changed) != 1:
            return ""
        number, old, new = changed[0]
        tokens = zip(_TOKEN.split(old), _TOKEN.split(new), strict=False)
        differ = [f"{number} {a} to {b}" for a, b in tokens if a != b]
        if not differ or self.candidate(task, differ[0]) != code:
            return ""
        return differ[0] if differ[0][-1].isalnum() else f"{differ[0]} "


WHOLE_FUNCTION = WholeFunction()
ONE_TOKEN = OneToken()


def _lines(source: str) -> list[str]:
    return source.rstrip().split("\n")
