"""Presets of ``text/Questions-v1``: the fields, the prompt and the reward of common datasets.

Takes: a row of a dataset in a known format. Gives: its question, its right answer and an expert's
answer. Never: imports a reward.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollart_envs.rows import Row, RowError

_FINAL = re.compile(r"####\s*(\S.*?)\s*$")
_FENCE: Final = "```"
_DEFINED = re.compile(r"^def (\w+)\(", re.MULTILINE)
_CALLED = re.compile(r"assert\s+\(?(\w+)\(")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a preset reads in a row."""

    question: str
    context: Mapping[str, Any]
    """Data for the reward: ``reference``, ``tests``."""
    demonstration: str | None = None
    """An answer that the reward accepts, in the form that the prompt asks for."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One format of rows."""

    prompt: str
    """Text before every question."""
    reward: Mapping[str, Any]
    """The reward that fits, as in the run config."""
    read: Callable[[Row], Parts]
    """Raises RowError if a field is missing or has an unknown form."""


def _gsm8k(row: Row) -> Parts:
    """Read a row of GSM8K: the number after ``####`` is the right answer."""
    whole = _text(row, "answer")
    found = _FINAL.search(whole)
    if found is None:
        raise RowError("answer", f"is {whole[-60:]!r}; it must end with #### and a number")
    right = found[1].replace(",", "")
    return Parts(_text(row, "question"), {"reference": right}, whole)


def _math(row: Row) -> Parts:
    r"""Read a row of MATH: the last ``\boxed{}`` of the solution is the right answer."""
    question = _text(row, "problem" if "problem" in row else "question")
    if row.get("solution") is None:
        right = _text(row, "answer")
        return Parts(question, {"reference": right}, f"\\boxed{{{right}}}")
    solution = _text(row, "solution")
    right = str(row.get("answer") or _boxed(solution))
    return Parts(question, {"reference": right}, solution)


def _boxed(solution: str) -> str:
    start = solution.rfind("\\boxed{")
    depth = 0
    for position in range(start + 6, len(solution) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if depth == 0:
            return solution[start + 7 : position].strip()
    raise RowError("solution", r"has no \boxed{...}, and the row has no field 'answer'")


def _multiple_choice(row: Row) -> Parts:
    """Read a question with ``choices`` (or ``options``), as in MMLU, ARC and CommonsenseQA."""
    field = "choices" if "choices" in row else "options"
    given: Any = row.get(field)
    labels: list[str] = []
    if isinstance(given, Mapping):  # columns: {"text": [...], "label": [...]}
        labels, given = [str(one) for one in given.get("label", ())], given.get("text")
    if not isinstance(given, list) or not 2 <= len(given) <= len(string.ascii_uppercase):
        raise RowError(field, f"is {given!r:.60}; it must be a list of 2 to 26 choices")
    letters = string.ascii_uppercase[: len(given)]
    right = _letter(row, [str(one) for one in given], labels)
    shown = "\n".join(f"{letter}. {one}" for letter, one in zip(letters, given, strict=True))
    return Parts(f"{_text(row, 'question')}\n{shown}", {"reference": right}, right)


def _letter(row: Row, choices: list[str], labels: list[str]) -> str:
    """Return the letter of the right choice, given as index, letter, label or text."""
    field = next((f for f in ("answer", "answerKey", "label") if row.get(f) is not None), "answer")
    given: Any = row.get(field)
    letters = string.ascii_uppercase[: len(choices)]
    index = given if isinstance(given, int) and not isinstance(given, bool) else None
    for names in (labels, letters, choices):
        if index is None and str(given).strip() in names:
            index = list(names).index(str(given).strip())
    if index is None or not 0 <= index < len(choices):
        raise RowError(field, f"is {given!r:.60}; it must name one of the {len(choices)} choices")
    return letters[index]


def _code(row: Row) -> Parts:
    """Read a task with tests: RollArt's ``tests``, or the fields of MBPP or HumanEval."""
    question = _text(row, next((f for f in ("prompt", "question", "text") if f in row), "prompt"))
    solved = row.get("solution") or row.get("code")
    if "test_list" in row:
        tests, shown = _mbpp_tests(row, str(solved or ""))
        question = f"{question}\nIt must pass these tests:\n{shown}"
    elif "test" in row and "entry_point" in row:
        tests = {"entry_point": _text(row, "entry_point"), "test": _text(row, "test")}
        if row.get("canonical_solution") is not None:
            solved = f"{question}{row['canonical_solution']}"
    else:
        tests = row.get("tests")
    if not tests:
        raise RowError("tests", "is missing; MBPP's test_list, or HumanEval's test, also work")
    fenced = None if solved is None else f"{_FENCE}python\n{str(solved).strip()}\n{_FENCE}"
    return Parts(question, {"tests": tests}, fenced)


def _mbpp_tests(row: Row, solved: str) -> tuple[Any, str]:
    """Return the tests, and their text: the function is the one that solution and tests name."""
    tests: Any = row["test_list"]
    if not isinstance(tests, list) or not tests:
        raise RowError("test_list", f"is {tests!r:.60}; it must be a list of tests")
    shown = "\n".join(map(str, tests))
    defined = [name for name in _DEFINED.findall(solved) if f"{name}(" in shown]
    called = [*defined, *_CALLED.findall(shown)]
    if not called:
        raise RowError("test_list", f"calls no function: {tests[0]!r:.60}")
    setup = str(row.get("test_setup_code") or "")
    return {"entry_point": called[0], "test": [str(one) for one in tests], "setup": setup}, shown


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    what = "is missing" if value is None else f"is {value!r:.60}; it must be a text"
    raise RowError(field, what)


PRESETS: Final[Mapping[str, Preset]] = {
    "gsm8k": Preset(
        "Solve the problem step by step. Write #### and the number at the end.",
        {"id": "numeric"},
        _gsm8k,
    ),
    "math": Preset(
        "Solve the problem step by step. Put the final answer in \\boxed{}.",
        {"id": "math", "answer": "boxed"},
        _math,
    ),
    "multiple-choice": Preset(
        "Answer the question. End with the letter of the right choice.",
        {"id": "exact-match", "answer": {"pattern": r"\b([A-Z])(?=[\W_]*$|[).:]\s)"}},
        _multiple_choice,
    ),
    "code": Preset(
        "Write Python. Give the whole program in one fenced block.",
        {"id": "unit-tests"},
        _code,
    ),
}
"""Name -> preset."""
