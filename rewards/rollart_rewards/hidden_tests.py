"""The forms in which an environment hands over unit tests, and when an output is right.

Takes: ``reward_context["tests"]``. Gives: tests in Python, or inputs with their outputs. Never:
runs anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart_sandboxes.judging.functions import HiddenTest


@dataclass(frozen=True, slots=True)
class PythonTests:
    """Tests that are Python: they call the function, and raise when it is wrong."""

    tests: tuple[HiddenTest, ...]


@dataclass(frozen=True, slots=True)
class CaseTests:
    """Tests that are inputs and outputs."""

    inputs: tuple[object, ...]
    outputs: tuple[object, ...]
    entry_point: str = ""


def read_tests(given: object) -> PythonTests | CaseTests:
    """Return the tests that an environment hands over.

    Args:
        given: ``{"entry_point", "test", "setup"}``, where ``test`` is source or a list of it (one
            ``assert`` each, as MBPP has them; a ``check(candidate)`` is called, as HumanEval's
            is); or ``{"inputs", "outputs", "entry_point"}``, as APPS has them.

    Raises:
        ValueError: When it is neither, or has no tests.
    """
    raw = _parsed(given)
    name = raw.get("entry_point", raw.get("fn_name")) or ""
    if not isinstance(name, str):
        raise ValueError(f"the tests' entry_point is {name!r:.60}, not a name")
    if "inputs" in raw:
        return _cases(raw, name)
    tests = raw.get("test")
    several = tests if isinstance(tests, list) else [tests]
    if not several or not all(isinstance(one, str) and one.strip() for one in several):
        raise ValueError("the tests have neither a `test` with source nor `inputs`")
    if not name.isidentifier():
        raise ValueError(f"the tests' entry_point is {name!r:.60}, not the name of a function")
    setup = raw.get("setup") or ""
    if not isinstance(setup, str):
        raise ValueError("the tests' setup is no text")
    return PythonTests(tuple(_python_test(str(one), name, setup) for one in several))


def is_right(output: str, wanted: object, *, is_json: bool, abs_tol: float) -> bool:
    """Return whether a program's output is the right one.

    Args:
        output: What it printed, or its result as JSON.
        wanted: What is right: a text, or any JSON.
        is_json: Whether the output is the result of a function.
        abs_tol: How far numbers may be apart.
    """
    if is_json:
        try:
            return _alike(json.loads(output), wanted, abs_tol)
        except (ValueError, RecursionError):
            return False
    text = "\n".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
    said, right = ([line.split() for line in t.strip().splitlines()] for t in (output, text))
    return len(said) == len(right) and all(
        len(a) == len(b) and all(_words_alike(x, y, abs_tol) for x, y in zip(a, b, strict=True))
        for a, b in zip(said, right, strict=True)
    )


def _parsed(given: object) -> Mapping[str, Any]:
    """Return the tests as an object; data sets often hold them as text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"the tests are a text that is no JSON: {e}") from e
    if not isinstance(given, Mapping):
        raise ValueError(f"the tests are {given!r:.60}, not an object")
    return given


def _cases(raw: Mapping[str, Any], name: str) -> CaseTests:
    inputs, outputs = raw["inputs"], raw.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("the tests' inputs and outputs are not lists with something in them")
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        if not all(isinstance(one, list) for one in inputs):
            raise ValueError("the inputs of a function are lists of arguments")
        return CaseTests(tuple(inputs), tuple(outputs), name)
    joined = ("\n".join(map(str, one)) if isinstance(one, list) else str(one) for one in inputs)
    return CaseTests(tuple(joined), tuple(outputs))


def _python_test(source: str, name: str, setup: str) -> HiddenTest:
    if "def check(" in source and f"check({name})" not in source:
        source = f"{source.rstrip()}\n\ncheck({name})\n"
    return HiddenTest(name, source, setup)


def _alike(said: object, right: object, abs_tol: float) -> bool:
    if isinstance(said, bool) or isinstance(right, bool):
        return said is right
    if isinstance(said, int | float) and isinstance(right, int | float):
        return said == right or math.isclose(said, right, rel_tol=0.0, abs_tol=abs_tol)
    if isinstance(said, list) and isinstance(right, list | tuple):
        return len(said) == len(right) and all(
            _alike(a, b, abs_tol) for a, b in zip(said, right, strict=True)
        )
    if isinstance(said, dict) and isinstance(right, Mapping):
        return said.keys() == right.keys() and all(_alike(said[k], right[k], abs_tol) for k in said)
    return said == right


def _words_alike(said: str, right: str, abs_tol: float) -> bool:
    if said == right:
        return True
    try:
        return abs_tol > 0 and abs(float(said) - float(right)) <= abs_tol
    except ValueError:
        return False
