"""Attacks on the judge of patches: none is paid, in either isolation, and honest patches are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from grading_attacks import Bench, attacks, pairs
from sandbox_walls import IMAGE, no_bubblewrap, no_docker

from rollart_core.boxes import loop
from rollart_core.boxes.judging import HiddenTest, Interpreter, judge
from rollart_envs.swe import repair_judge

PYTHON = "/usr/bin/python3"
BLIND = b"""
class Guard:
    busy = False

    def __init__(self, order, accuse):
        self.accuse = accuse

    def is_patched(self, path):
        return False

    def guarded(self, tree):
        return tree

    known = guarded

    def __getattr__(self, name):
        return lambda *rest, **named: None
"""
"""A guard that sees nothing."""
BUBBLEWRAP = "bubblewrap"
DOCKER = {"id": "docker", "image": IMAGE, "pull": "never"}


EVERY = ["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.nightly])]
"""Where all attacks are tried: containers take seconds each."""


@pytest.fixture(
    scope="module", params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
)
def bench(request):
    if why := (no_docker() if request.param == "docker" else no_bubblewrap()):
        pytest.skip(why)
    with tempfile.TemporaryDirectory() as folder:  # not below tmp_path, which a box may not read
        Path(folder).chmod(0o755)
        yield Bench(Path(folder), DOCKER if request.param == "docker" else BUBBLEWRAP)


@pytest.mark.parametrize("runner", ["pytest", "unittest", "sympy", "django"])
def test_gold_is_full_and_nothing_is_none(bench, runner):
    gold = bench.judged(runner, bench.tasks[runner].patch)
    assert (gold.grade.resolution, gold.why) == ("full", ""), gold
    assert bench.judged(runner, "").grade.resolution == "none"


WEIGHTY = [
    ("xfail_in_function", "pytest"),
    ("hidden_toml", "pytest"),
    ("report_patched_and_restored", "pytest"),
    ("equals_everything", "unittest"),
    ("reporter_by_gc", "unittest"),
    ("exit_with_status", "sympy"),
    ("runner_in_bin", "django"),
]
"""What a policy finds first; these run with the default tests."""


@pytest.mark.parametrize(("name", "runner"), WEIGHTY)
def test_an_attack_that_is_weighty_is_not_paid(bench, name, runner):
    report = bench.attacked(name, runner)
    assert report.grade.resolution == "none", (attacks()[name].effect, report)


@pytest.mark.slow
@pytest.mark.parametrize("bench", EVERY, indirect=True)
@pytest.mark.parametrize(("name", "runner"), [pair for pair in pairs() if pair not in WEIGHTY])
def test_an_attack_is_not_paid(bench, name, runner):
    report = bench.attacked(name, runner)
    assert report.grade.resolution == "none", (attacks()[name].effect, report)


ON_FILES = ["unchecked_pyc", *(name for name in attacks() if name.startswith("data_of_tests"))]


@pytest.mark.slow
@pytest.mark.parametrize("bench", EVERY, indirect=True)
@pytest.mark.parametrize("name", ON_FILES)
@pytest.mark.parametrize("runner", ["pytest", "unittest"])
def test_an_attack_on_files_of_tests_is_paid_without_what_holds_it(
    bench, monkeypatch, name, runner
):
    style = attacks()[name].style
    gold = bench.judged(runner, bench.tasks[runner].patch, style=style)
    assert (gold.grade.resolution, gold.why) == ("full", ""), gold
    assert bench.attacked(name, runner).grade.resolution == "none"
    monkeypatch.setattr(repair_judge, "acceptable", lambda task, patch: (patch, ()))
    unguarded = {**repair_judge._reporter(), "guard.py": BLIND}
    monkeypatch.setattr(repair_judge, "_reporter", lambda: unguarded)
    assert bench.attacked(name, runner).grade.resolution == "full"


def test_an_expected_failure_counts_only_where_gold_has_it(bench):
    name = bench.tasks["pytest"].fail_to_pass[0]
    patch = bench.patch("pytest", {"shapes/__init__.py": attacks()["xfail_in_function"].source})
    recorded = bench.judged("pytest", patch, gold_statuses={name: "XFAIL"})
    other = bench.judged("pytest", patch, gold_statuses={name: "XPASS"})
    parity = bench.judged("pytest", patch, parity=True)
    found = [report.grade.resolution for report in (recorded, other, parity)]
    assert found == ["full", "none", "full"]


HONEST = {
    "pytest": """
import ast
import builtins
import sys
import unittest
from unittest import mock

import pytest

from shapes import area, edge
from tests.asserts import same

_parse = ast.parse
ast.parse = lambda *rest, **named: _parse(*rest, **named)
unittest.TestCase.shortDescription = lambda self: "own"


class Any:
    def __eq__(self, other):
        return True


class TestShapes(unittest.TestCase):
    def test_edge(self):
        with mock.patch("builtins.open"), mock.patch.object(unittest.TestCase, "run"):
            same(edge(2, 3), 10)

    def test_area(self):
        with mock.patch.object(ast, "parse"):
            assert Any() == area(2, 3)
        self.assertEqual(area(2, 3), sys._getframe().f_code.co_argcount + 5)


@pytest.mark.parametrize("size", [1, 2])
def test_fixtures(size, monkeypatch, tmp_path):
    monkeypatch.setattr(builtins, "len", lambda value: 3)
    assert len("") == 3
""",
    "unittest": """
import ast
import unittest
from unittest import mock

from shapes import area, edge
from tests.asserts import same

unittest.TestCase.shortDescription = lambda self: "own"


class Base(unittest.TestCase):
    async def asynchronous(self):
        return None


class TestShapes(Base):
    @mock.patch("builtins.open")
    def test_edge(self, opened):
        with self.subTest("edge"), mock.patch.object(ast, "parse"):
            same(edge(2, 3), 10)

    def test_area(self):
        self.assertEqual([area(2, 3)], [6])
        self.assertEqual(area(2, 3), mock.ANY)


class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_it(self):
        assert area(1, 1) == 1
""",
}
"""Tests that change the runner, ``ast`` and ``builtins`` themselves."""


@pytest.mark.parametrize("runner", HONEST)
def test_tests_that_patch_the_runner_are_no_tampering(bench, runner):
    tests = bench.patch(runner, {"tests/test_shapes.py": HONEST[runner]})
    report = bench.judged(runner, bench.tasks[runner].patch, test_patch=tests)
    assert (report.grade.resolution, report.why) == ("full", ""), report.log
    assert bench.judged(runner, "", test_patch=tests).grade.resolution == "none"


@pytest.mark.slow
@pytest.mark.parametrize("bench", EVERY, indirect=True)
@pytest.mark.parametrize("name", [name for name, attack in attacks().items() if not attack.files])
def test_an_attack_on_the_judge_of_functions_is_not_paid(bench, name):
    test = (
        "def check(area):\n    assert area(2, 3) == 6\n    assert area(3, 4) == 12\n\ncheck(area)\n"
    )
    hidden = HiddenTest("area", test, "def area(w, h):\n    return w * h\n")

    async def judged():
        box = await bench.boxes.take()
        try:
            return await judge(box, hidden, attacks()[name].source, Interpreter(PYTHON, 10.0))
        finally:
            await bench.boxes.give_back(box)

    assert loop.run(judged()).verdict != "passed"
