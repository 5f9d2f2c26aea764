"""Unit tests as a reward: programs of the policy, run in a box."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.grading_attacks import attacks
from support.sandbox_types import no_bubblewrap, opened

from rollart_core.errors import RewardFailure, SandboxFailure
from rollart_core.plugins import registry
from rollart_rewards.examples import asked
from rollart_rewards.unit_tests import CaseTests, UnitTests, is_right, read_tests
from rollart_sandboxes.judging.functions import CaseOutput, Cases, run_cases
from rollart_testing import assert_checks, check_reward

pytestmark = pytest.mark.timeout(600)
ADDS = {"entry_point": "add", "test": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
SUMS = {"inputs": ["1 2\n", "5 5\n", "0 0"], "outputs": ["3", "10\n", "0"]}
CALLS = {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "entry_point": "add"}
GOOD = "def add(a, b):\n    return a + b\n"
READS = "a, b = map(int, input().split())\n"


@pytest.fixture(scope="module")
def reward() -> Iterator[UnitTests]:
    if why := no_bubblewrap():
        pytest.skip(why)
    made: UnitTests = registry.build("rewards", "unit-tests", options())
    yield made
    made.close()
    made.close()


def options(**more: Any) -> dict[str, Any]:
    return {"sandbox": "bubblewrap", "test_timeout_s": 30.0, "cpu_s": 1.0, **more}


def value(reward: UnitTests, program: str, tests: object) -> float:
    said = f"First:\n```\nnothing\n```\nso:\n```python\n{program}\n```\n"
    return reward.score(asked(said, context={"tests": tests})).value


@pytest.mark.parametrize(
    ("program", "tests", "wanted"),
    [
        (GOOD, ADDS, 1.0),
        (GOOD.replace("+", "-"), ADDS, 0.0),
        (GOOD, json.dumps(ADDS), 1.0),
        (GOOD, {"entry_point": "add", "test": "def check(f):\n    assert f(1, 1) == 3\n"}, 0.0),
        (READS + "print(a + b)", SUMS, 1.0),
        (READS + "print(a * b)", SUMS, 0.0),
        (GOOD, CALLS, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b\n", CALLS, 1.0),
        ("import sys\n" + GOOD + "print('noise')\nsys.stdout.close()", CALLS, 1.0),
    ],
)
def test_programs(reward: UnitTests, program: str, tests: object, wanted: float) -> None:
    assert value(reward, program, tests) == wanted


HOSTILE = {
    "kills what runs it": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "never ends": "while True:\n    pass\n",
    "eats memory": "x = bytearray(1 << 33)\n",
    "prints without end": "while True:\n    print('3' * 10000)\n",
    "links its input": "import os\nos.remove('input')\nos.symlink('/etc/passwd', 'input')\n",
}


@pytest.mark.parametrize("name", ["kills what runs it"])
def test_a_hostile_program_has_failed_its_tests(reward: UnitTests, name: str) -> None:
    assert value(reward, HOSTILE[name], SUMS) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("tests", [SUMS, ADDS], ids=["cases", "python"])
def test_hostile_programs(
    reward: UnitTests, name: str, tests: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, program, its_tests, wanted in (
        (1.0, HOSTILE[name] + GOOD.replace("+", "-"), tests, 0.0),
        (60.0, GOOD, ADDS, 1.0),
    ):
        config = reward.config.model_copy(update={"test_timeout_s": seconds})
        monkeypatch.setattr(reward, "config", config)
        assert value(reward, program, its_tests) == wanted


def test_credit_for_each_test_that_passes() -> None:
    if why := no_bubblewrap():
        pytest.skip(why)
    reward = UnitTests(**options(credit="share", max_tests=2))
    try:
        assert value(reward, READS + "print(3)", SUMS) == 0.5
        assert value(reward, "def add(a, b):\n    return 3\n", ADDS) == 0.5
    finally:
        reward.close()


@pytest.mark.parametrize("tests", [SUMS, ADDS], ids=["cases", "python"])
def test_what_one_sandbox_has_capacity_for_is_judged_with_one_sandbox(
    tests: dict[str, Any],
) -> None:
    if why := no_bubblewrap():
        pytest.skip(why)
    reward = UnitTests(**options(pool={"max_sandboxes": 1, "wait_s": 30}))
    try:
        program = HOSTILE["kills what runs it"] + GOOD
        assert value(reward, program, tests) == 0.0
    finally:
        reward.close()


def outputs(cases: Cases, program: str, **more: Any) -> list[CaseOutput] | None:
    async def main() -> list[CaseOutput] | None:
        async with opened("process", **more) as sandbox:
            return await run_cases(sandbox, cases, program, sys.executable)

    return asyncio.run(main())


def test_outputs_that_do_not_fit_into_one_answer_are_all_read() -> None:
    inputs = [str(n) for n in range(6)]
    found = outputs(Cases(inputs), "print(input() * 900000)")
    assert found == [CaseOutput("done", n * 900_000 + "\n") for n in inputs]
    program = "n = int(input())\nprint('x' * 900000)\nraise SystemExit(n == 2)"
    found = outputs(Cases(inputs, stops=True), program, output_bytes=2 << 20)
    assert found is not None
    assert [one.how for one in found] == ["done", "done", "crashed"]
    assert found[1].output == "x" * 900_000 + "\n"
    found = outputs(Cases(["1"]), "import sys\nsys.stdout.buffer.write(b'\\0' * 10**6)")
    assert found == [CaseOutput("done", "\0" * 1_000_000)]


def test_an_answer_that_never_fits_is_no_wrong_answer() -> None:
    with pytest.raises(SandboxFailure, match="raise the sandbox's output_bytes") as raised:
        outputs(Cases(["1", "2"]), "print('x' * 900000)", output_bytes=1 << 20)
    assert not raised.value.retryable


def test_a_program_that_floods_its_runner_has_no_outputs() -> None:
    flood = "import os\nout = os.open(f'/proc/{os.getppid()}/fd/%d', os.O_WRONLY)\n"
    flood += "for _ in range(80): os.write(out, b'x' * 65536)\n"
    assert outputs(Cases(["1", "2"]), flood % 1) is None
    found = outputs(Cases(["1", "2"]), flood % 2 + "print(input())")
    assert found == [CaseOutput("done", "1\n"), CaseOutput("done", "2\n")]


def test_it_keeps_its_contract(reward: UnitTests) -> None:
    assert_checks(check_reward(reward))


def test_a_broken_sandbox_is_a_failure_and_no_zero() -> None:
    if why := no_bubblewrap():
        pytest.skip(why)
    broken = UnitTests(**options(python="/no/python3"))
    with pytest.raises(RewardFailure, match="the sandbox of the unit tests"):
        value(broken, GOOD, ADDS)
    with pytest.raises(RewardFailure, match="the sandbox of the unit tests"):
        value(broken, GOOD, SUMS)
    broken.close()


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("{", "not JSON"),
        (3, "not an object"),
        ({}, "need a `test`"),
        ({"test": "assert f()"}, "not the name of a function"),
        ({"inputs": [], "outputs": []}, "lists that are not empty"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": [1], "entry_point": "f"}, "list of arguments"),
    ],
)
def test_tests_that_cannot_be_read_are_told(tests: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_tests(tests)


def test_outputs_are_compared_by_words_and_numbers() -> None:
    found = read_tests({"inputs": [["1", "2"]], "outputs": [["3", "4"]]})
    assert found == CaseTests(("1\n2",), (["3", "4"],))
    for output, wanted, right in (
        ("3\n4\n", ["3", "4"], True),
        ("3 4", ["3", "4"], False),
        ("a  b \n", "a b", True),
        ("0.30000001", "0.3", True),
        ("0.4", "0.3", False),
    ):
        assert is_right(output, wanted, is_json=False, abs_tol=1e-6) is right
    for output, thing, right in (
        ("[1, 2.0]", (1, 2), True),
        ("true", 1, False),
        ('{"a": [1]}', {"a": [1]}, True),
        ("", None, False),
    ):
        assert is_right(output, thing, is_json=True, abs_tol=0.0) is right


AREAS = (
    {"entry_point": "area", "test": ["assert area(2, 3) == 6", "assert area(3, 4) == 12"]},
    {"entry_point": "area", "inputs": [[2, 3], [3, 4]], "outputs": [6, 12]},
)


@pytest.mark.slow
@pytest.mark.parametrize("tests", AREAS, ids=["python", "cases"])
@pytest.mark.parametrize(
    "name", [n for n, one in attacks().items() if not (one.files or one.needs)]
)
def test_an_attack_is_not_paid(reward: UnitTests, name: str, tests: dict[str, Any]) -> None:
    assert value(reward, attacks()[name].source, tests) == 0.0, attacks()[name].effect
