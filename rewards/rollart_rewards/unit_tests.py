"""Does the policy's program pass the tests? They run in a box.

Takes: one episode's request; the program is the last fenced block of the policy's last message.
Gives: 1 or 0, or the share of tests that pass. Never: runs a program outside of a box, or takes a
broken box for a wrong program.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import RewardFailure, SandboxFailure
from rollart_core.rollout import loop
from rollart_rewards.answer import context_of, last_block
from rollart_rewards.config_tests import UnitTestsConfig
from rollart_rewards.examples import asked
from rollart_rewards.hidden_tests import CaseTests, PythonTests, is_right, read_tests
from rollart_sandboxes.judging.cases import Cases, run_cases
from rollart_sandboxes.judging.functions import HiddenTest, JudgeInterpreter, find_python, judge
from rollart_sandboxes.pool.source import SandboxSource, sandbox_source

_SOUND = HiddenTest("same", "assert same(1) == 1")
_SOUND_SOURCE = "def same(x):\n    return x\n"


@dataclass(frozen=True, slots=True)
class _Ran:
    """What came of a program's tests."""

    passed: int
    num_tests: int
    silenced: bool = False
    """Whether what runs the tests gave no answer: for the program's fault, or the box's."""


class UnitTests(Reward):
    """Runs tests; see the module.

    Args:
        options: The fields of :class:`UnitTestsConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = UnitTestsConfig.model_validate(options)
        self._boxes = sandbox_source(self.config.sandbox, self.config.pool)
        self._end = weakref.finalize(self, _let_go, self._boxes)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: When the environment gives no tests, or none that can be read.
            RewardFailure: When the box failed.
        """
        tests = read_tests(context_of(request, self.config.tests))
        try:
            passed, num_tests = loop.run(self._run(tests, last_block(request.answer)))
        except SandboxFailure as e:
            failure = RewardFailure(f"the box of the unit tests: {e}", boundary="reward.box")
            failure.retryable = e.retryable
            raise failure from e
        value = passed / num_tests if self.config.credit == "share" else passed == num_tests
        return RewardResult(
            float(value), {"tests_passed": float(passed), "num_tests": float(num_tests)}
        )

    def examples(self) -> Sequence[RewardExample]:
        """Return a right program, a wrong one, and none, by tests of both forms."""
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
        """Let go of the boxes; may be called twice."""
        self._end()

    async def _run(self, tests: PythonTests | CaseTests, source: str) -> tuple[int, int]:
        """Return how many tests pass, of how many."""
        box = await self._boxes.take()
        try:
            python = self.config.python or await find_python(box)
            if isinstance(tests, CaseTests):
                ran = await self._run_cases(box, tests, source, python)
            else:
                ran = await self._run_python(box, tests, source, python)
        finally:
            await self._boxes.give_back(box)
        if ran.silenced:  # the first box is back: who holds one does not wait for another
            await self._expect_sound(python)
        return ran.passed, ran.num_tests

    async def _run_python(self, box: Sandbox, tests: PythonTests, source: str, python: str) -> _Ran:
        asked_for = tests.tests[: self.config.max_tests]
        interpreter = JudgeInterpreter(python, self.config.test_timeout_s)
        passed = 0
        for test in asked_for:
            judgement = await judge(box, test, source, interpreter)
            if judgement.verdict == "error":
                return _Ran(passed, len(asked_for), silenced=True)
            passed += judgement.verdict == "passed"
            if self.config.credit == "all" and judgement.verdict == "failed":
                break
        return _Ran(passed, len(asked_for))

    async def _run_cases(self, box: Sandbox, tests: CaseTests, source: str, python: str) -> _Ran:
        config = self.config
        inputs = tests.inputs[: config.max_tests]
        stops = config.credit == "all"
        cases = Cases(inputs, tests.entry_point, config.cpu_s, stops)
        outputs = await run_cases(box, cases, source, python)
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
        """Raise unless tests work in a box that no program has been in.

        Raises:
            SandboxFailure: They do not.
        """
        box = await self._boxes.take()
        try:
            interpreter = JudgeInterpreter(python, self.config.test_timeout_s)
            found = await judge(box, _SOUND, _SOUND_SOURCE, interpreter)
        finally:
            await self._boxes.give_back(box)
        if found.verdict != "passed":
            raise SandboxFailure(
                f"a sound program is judged {found.verdict} in a fresh box: {found.reason}",
                boundary="reward.box",
            )


def _let_go(boxes: SandboxSource) -> None:
    loop.run(boxes.close())
