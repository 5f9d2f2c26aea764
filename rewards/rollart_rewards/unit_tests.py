"""Check whether the policy's program passes the tests, in a sandbox.

The environment provides the tests in ``reward_context["tests"]``: tests in Python, or inputs with
their outputs.

Takes: one episode's request; the program is the last fenced block of the policy's last message.
Gives: 1 or 0, or the share of tests that pass. Never: runs a program outside a sandbox, or treats a
broken sandbox as a wrong program.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import RewardFailure, SandboxFailure
from rollart_core.rollout import loop
from rollart_rewards.answer import context_of, last_block
from rollart_rewards.config import UnitTestsConfig
from rollart_rewards.examples import asked
from rollart_sandboxes.judging.functions import (
    Cases,
    HiddenTest,
    JudgeInterpreter,
    find_python,
    judge,
    run_cases,
)
from rollart_sandboxes.pool.source import SandboxSource, sandbox_source

_SOUND = HiddenTest("same", "assert same(1) == 1")
_SOUND_SOURCE = "def same(x):\n    return x\n"


@dataclass(frozen=True, slots=True)
class _Ran:
    """The result of a program's tests."""

    passed: int
    num_tests: int
    silenced: bool = False
    """Whether the test runner gave no answer, because of the program or of the sandbox."""


class UnitTests(Reward):
    """Run tests; see the module.

    Args:
        options: The fields of :class:`UnitTestsConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = UnitTestsConfig.model_validate(options)
        self._sandboxes = sandbox_source(self.config.sandbox, self.config.pool)
        self._end = weakref.finalize(self, _let_go, self._sandboxes)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If the environment provides no tests, or none that can be read.
            RewardFailure: If the sandbox failed.
        """
        tests = read_tests(context_of(request, self.config.tests))
        try:
            passed, num_tests = loop.run(self._run(tests, last_block(request.answer)))
        except SandboxFailure as e:
            failure = RewardFailure(
                f"the sandbox of the unit tests: {e}", boundary="reward.sandbox"
            )
            failure.retryable = e.retryable
            raise failure from e
        value = passed / num_tests if self.config.credit == "share" else passed == num_tests
        return RewardResult(
            float(value), {"tests_passed": float(passed), "num_tests": float(num_tests)}
        )

    def examples(self) -> Sequence[RewardExample]:
        """Return a right program, no program, and a program for inputs, with both test forms."""
        python = {"entry_point": "twice", "test": ["assert twice(2) == 4", "assert twice(0) == 0"]}
        cases = {"inputs": ["2\n", "0\n"], "outputs": ["4", "0"]}
        right = "```python\ndef twice(x):\n    return 2 * x\n```"
        told = (
            (right, python, 1.0),
            ("I cannot.", python, 0.0),
            ("```\nprint(2 * int(input()))\n```", cases, 1.0),
        )
        return tuple(
            RewardExample((asked(said, context={self.config.tests: tests}),), (value,))
            for said, tests, value in told
        )

    def close(self) -> None:
        """Release the sandboxes; can be called twice."""
        self._end()

    async def _run(self, tests: PythonTests | CaseTests, source: str) -> tuple[int, int]:
        """Return the number of tests that pass, and the number of tests."""
        sandbox = await self._sandboxes.take()
        try:
            python = self.config.python or await find_python(sandbox)
            if isinstance(tests, CaseTests):
                ran = await self._run_cases(sandbox, tests, source, python)
            else:
                ran = await self._run_python(sandbox, tests, source, python)
        finally:
            await self._sandboxes.give_back(sandbox)
        if ran.silenced:  # the first sandbox is returned: never wait for one while holding another
            await self._expect_sound(python)
        return ran.passed, ran.num_tests

    async def _run_python(
        self, sandbox: Sandbox, tests: PythonTests, source: str, python: str
    ) -> _Ran:
        asked_for = tests.tests[: self.config.max_tests]
        interpreter = JudgeInterpreter(python, self.config.test_timeout_s)
        passed = 0
        for test in asked_for:
            judgement = await judge(sandbox, test, source, interpreter)
            if judgement.verdict == "error":
                return _Ran(passed, len(asked_for), silenced=True)
            passed += judgement.verdict == "passed"
            if self.config.credit == "all" and judgement.verdict == "failed":
                break
        return _Ran(passed, len(asked_for))

    async def _run_cases(
        self, sandbox: Sandbox, tests: CaseTests, source: str, python: str
    ) -> _Ran:
        config = self.config
        inputs = tests.inputs[: config.max_tests]
        stops = config.credit == "all"
        cases = Cases(inputs, tests.entry_point, config.cpu_s, stops)
        outputs = await run_cases(sandbox, cases, source, python)
        if outputs is None:
            return _Ran(0, len(inputs), silenced=True)
        passed = sum(
            found.how == "done"
            and is_right(
                found.output, wanted, is_json=bool(tests.entry_point), abs_tol=config.abs_tol
            )
            for found, wanted in zip(outputs, tests.outputs, strict=False)
        )
        return _Ran(passed, len(inputs))

    async def _expect_sound(self, python: str) -> None:
        """Raise an error unless tests work in a sandbox that has run no program.

        Raises:
            SandboxFailure: If they do not.
        """
        sandbox = await self._sandboxes.take()
        try:
            interpreter = JudgeInterpreter(python, self.config.test_timeout_s)
            found = await judge(sandbox, _SOUND, _SOUND_SOURCE, interpreter)
        finally:
            await self._sandboxes.give_back(sandbox)
        if found.verdict != "passed":
            raise SandboxFailure(
                f"a correct program is judged {found.verdict} in a new sandbox: {found.reason}",
                boundary="reward.sandbox",
            )


def _let_go(sandboxes: SandboxSource) -> None:
    loop.run(sandboxes.close())


@dataclass(frozen=True, slots=True)
class PythonTests:
    """Tests in Python: they call the function, and raise an exception if it is wrong."""

    tests: tuple[HiddenTest, ...]


@dataclass(frozen=True, slots=True)
class CaseTests:
    """Tests that consist of inputs and outputs."""

    inputs: tuple[object, ...]
    outputs: tuple[object, ...]
    entry_point: str = ""


def read_tests(given: object) -> PythonTests | CaseTests:
    """Return the tests that an environment provides.

    Args:
        given: ``{"entry_point", "test", "setup"}``, where ``test`` is source or a list of sources
            (one ``assert`` each, as in MBPP; a ``check(candidate)`` is called, as in HumanEval);
            or ``{"inputs", "outputs", "entry_point"}``, as in APPS.

    Raises:
        ValueError: If it is neither, or has no tests.
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
        raise ValueError("the tests need a `test` with source, or `inputs` and `outputs`")
    if not name.isidentifier():
        raise ValueError(f"the tests' entry_point is {name!r:.60}, not the name of a function")
    setup = raw.get("setup") or ""
    if not isinstance(setup, str):
        raise ValueError("the setup of the tests is not a text")
    return PythonTests(tuple(_python_test(str(one), name, setup) for one in several))


def is_right(output: str, wanted: object, *, is_json: bool, abs_tol: float) -> bool:
    """Return whether a program's output is the right one.

    Args:
        output: The printed text, or the result as JSON.
        wanted: The right output: a text, or any JSON value.
        is_json: Whether the output is the result of a function.
        abs_tol: Allowed absolute difference of numbers.
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
    """Return the tests as an object; data sets often store them as text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"the tests are a text that is not JSON: {e}") from e
    if not isinstance(given, Mapping):
        raise ValueError(f"the tests are {given!r:.60}, not an object")
    return given


def _cases(raw: Mapping[str, Any], name: str) -> CaseTests:
    inputs, outputs = raw["inputs"], raw.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("the inputs and outputs of the tests must be lists that are not empty")
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        if not all(isinstance(one, list) for one in inputs):
            raise ValueError("each input of a function must be a list of arguments")
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
