"""Attacks on the judge of patches: none is paid, in either isolation, and honest patches are."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from support.grading_attacks import GOLD, LINTING, READING, SIGNING, Bench, attacks, pairs
from support.sandbox_types import IMAGE, no_bubblewrap, no_docker

from rollart_core.rollout import loop
from rollart_envs.swe import repair_judge
from rollart_sandboxes.judging.functions import HiddenTest, JudgeInterpreter, judge

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


BOTH, PYTEST = ("pytest", "unittest"), ("pytest",)
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


@pytest.mark.parametrize("runner", ["pytest", "unittest"])
def test_the_signature_of_a_test_may_be_read_and_its_code_may_not(bench, runner):
    """In a file whose base reads signatures; pytest's fixtures and decorators do it too."""
    reads = "def seen(function):\n    {}\n\n\n" + (
        "def area(w, h):\n    for name, module in list(sys.modules.items()):\n"
        "        found = getattr(getattr(module, 'TestShapes', None), 'test_area', None)\n"
        "        if name.endswith('test_shapes') and found is not None:\n"
        "            return seen(found) or w * h\n    return w * h\n"
    )
    init = "from shapes.signing import area\n\n\ndef edge(w, h):\n    return 2 * (w + h)\n"
    for use, resolution in (("names_of(function)", "full"), ("function.__code__", "none")):
        files = {"shapes/signing.py": f"import sys\n{SIGNING}\n\n{reads.format(use)}"}
        patch = bench.patch(runner, {**files, "shapes/__init__.py": init})
        report = bench.judged(runner, patch)
        assert report.grade.resolution == resolution, report


HELD_BY_THE_GUARD = [
    *((name, runner) for name in attacks() if name.startswith("data_of_tests") for runner in BOTH),
    *(("unchecked_pyc", runner) for runner in BOTH),
    *((name, runner) for name in attacks() if name.startswith("frames_by_") for runner in PYTEST),
    ("assertion_patched_and_restored", "unittest"),
    ("code_called_by_a_library", "sympy"),
    ("code_under_another_name", "django"),
    ("code_with_another_name", "unittest"),
    ("constants_by_loader", "sympy"),
    ("constants_by_rewriting", "pytest"),
    ("items_of_session", "pytest"),
    ("line_by_traceback", "sympy"),
    ("line_by_warning", "django"),
    ("module_written_at_run_time", "django"),
    ("plugin_under_another_name", "pytest"),
    ("source_by_a_library", "pytest"),
    ("source_by_folder_descriptor", "sympy"),
    ("source_by_loader", "unittest"),
    ("source_by_mmap", "django"),
    ("source_by_numpy_memmap", "unittest"),
    ("source_by_process", "pytest"),
    ("source_by_process_pool", "unittest"),
    ("source_by_raw_process", "django"),
    ("source_by_thread_pool", "sympy"),
    ("source_in_renamed_folder", "pytest"),
    ("test_of_builtins", "pytest"),
    ("test_wrapped", "pytest"),
]


@pytest.mark.slow
@pytest.mark.parametrize("bench", EVERY, indirect=True)
@pytest.mark.parametrize(("name", "runner"), HELD_BY_THE_GUARD)
def test_an_attack_is_paid_without_what_holds_it(bench, monkeypatch, name, runner):
    style = attacks()[name].style
    gold = bench.judged(runner, bench.tasks[runner].patch, style=style)
    assert (gold.grade.resolution, gold.why) == ("full", ""), gold
    assert bench.attacked(name, runner).grade.resolution == "none"
    monkeypatch.setattr(repair_judge, "acceptable", lambda task, patch: (patch, ()))
    unguarded = {**repair_judge._reporter(), "guard.py": BLIND}
    monkeypatch.setattr(repair_judge, "_reporter", lambda: unguarded)
    assert bench.attacked(name, runner).grade.resolution == "full"


FIXTURE = "import pytest\n\n\n@pytest.fixture\ndef wanted():\n    return 6\n"
STEERING = """
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""


@pytest.mark.parametrize(
    "files",
    [
        {"conftest.py": FIXTURE + '\npytest_plugins = ["evil"]\n', "evil.py": STEERING},
        {"conftest.py": FIXTURE + STEERING},
    ],
    ids=["plugins", "hook"],
)
def test_a_conftest_of_the_gold_patch_brings_no_plugin_that_gold_does_not(bench, files):
    gold = bench.patch("pytest", {**GOLD, "conftest.py": FIXTURE})
    own = bench.judged("pytest", gold, gold=gold)
    assert (own.grade.resolution, own.why, own.left_out) == ("full", "", ())
    wrong = {"shapes/__init__.py": attacks()["xfail_in_function"].source, **files}
    report = bench.judged("pytest", bench.patch("pytest", wrong), gold=gold)
    assert report.left_out == ()
    assert report.grade.resolution == "none"
    assert report.why.startswith("tampered: the patch ")


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


LIBRARIES = """
import collections
import dataclasses
import logging
import pathlib
import platform
import shutil
import tempfile
import traceback
import uuid
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

Size = collections.namedtuple("Size", "w h")
Pair = NamedTuple("Pair", [("w", int), ("h", int)])
template = "def product(w, h): return w * h"
scope = {}
exec(template, scope)


@dataclasses.dataclass
class Rectangle:
    w: int
    h: int

    def __post_init__(self):
        logging.getLogger("shapes").warning("a rectangle")


def area(w, h):
    warnings.warn("area", UserWarning, stacklevel=2)
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, "inner").mkdir()
    shutil.rmtree(folder)
    rectangle = Rectangle(w, h)
    weakref.finalize(rectangle, print, platform.platform(), uuid.uuid4())
    try:
        raise ValueError(w)
    except ValueError:
        logging.exception(traceback.format_exc())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(scope["product"], rectangle.w, rectangle.h).result()


def edge(w, h):
    return 2 * sum(Size(w, h))
"""
"""A repair whose libraries look at frames, open folders and start processes by themselves."""


@pytest.mark.parametrize("runner", ["pytest", "unittest", "sympy", "django"])
def test_what_libraries_do_of_their_own_accord_is_no_tampering(bench, runner):
    report = bench.judged(runner, bench.patch(runner, {"shapes/__init__.py": LIBRARIES}))
    assert (report.grade.resolution, report.why) == ("full", ""), report.log


@pytest.mark.parametrize("runner", HONEST)
def test_tests_that_patch_the_runner_are_no_tampering(bench, runner):
    tests = bench.patch(runner, {"tests/test_shapes.py": HONEST[runner]})
    report = bench.judged(runner, bench.tasks[runner].patch, test_patch=tests)
    assert (report.grade.resolution, report.why) == ("full", ""), report.log
    assert bench.judged(runner, "", test_patch=tests).grade.resolution == "none"


READS_ITSELF = """
import unittest

from shapes import area, edge
from shapes.reading import text_of


class TestShapes(unittest.TestCase):
    def test_edge(self):
        assert edge(2, 3) == 10
        assert "class TestShapes" in text_of(__file__)

    def test_area(self):
        assert area(2, 3) == 6
"""


@pytest.mark.parametrize("reading", [READING + "\n\ndef other():\n    pass\n", None])
def test_code_of_the_base_may_read_sources_of_tests_that_new_code_may_not(bench, reading):
    other = "import io\n\n\ndef text_of(path):\n    return io.open(path).read()\n"
    files = {**GOLD, "shapes/reading.py": reading or other}
    tests = bench.patch("pytest", {"tests/test_shapes.py": READS_ITSELF})
    report = bench.judged("pytest", bench.patch("pytest", files), test_patch=tests)
    found = (report.grade.resolution, report.why)
    assert found == (("full", "") if reading else ("none", "tampered: reading.py uses open (open)"))


@pytest.mark.parametrize("function", ["read", "readlines"])
def test_a_library_may_read_sources_of_tests_only_by_what_the_base_calls(bench, function):
    changed = LINTING.replace(".read()", f".{function}()").replace("return", "return 0 or")
    files = {**GOLD, "shapes/linting.py": changed}
    text = READS_ITSELF.replace("shapes.reading", "shapes.linting")
    text = text.replace('"class TestShapes" in text_of(__file__)', "text_of(__file__)")
    tests = bench.patch("pytest", {"tests/test_shapes.py": text})
    report = bench.judged("pytest", bench.patch("pytest", files), test_patch=tests)
    wrong = ("none", "tampered: linting.py uses open (open)")
    found = (report.grade.resolution, report.why)
    assert found == (("full", "") if function == "read" else wrong), report.log


@pytest.mark.slow
@pytest.mark.parametrize("bench", EVERY, indirect=True)
@pytest.mark.parametrize(
    "name", [n for n, one in attacks().items() if not (one.files or one.needs)]
)
def test_an_attack_on_the_judge_of_functions_is_not_paid(bench, name):
    test = (
        "def check(area):\n    assert area(2, 3) == 6\n    assert area(3, 4) == 12\n\ncheck(area)\n"
    )
    hidden = HiddenTest("area", test, "def area(w, h):\n    return w * h\n")

    async def judged():
        sandbox = await bench.sandboxes.take()
        try:
            return await judge(
                sandbox, hidden, attacks()[name].source, JudgeInterpreter(PYTHON, 10.0)
            )
        finally:
            await bench.sandboxes.give_back(sandbox)

    assert loop.run(judged()).verdict != "passed"


def test_the_table_of_attacks_in_the_docs_is_whole(repo_root):
    text = (repo_root / "tests/attacks/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w, ]+) \| ([\w, ]+) \| (`\w+`(?:, `\w+`)*) \|$", text, re.MULTILINE)
    listed = {
        name: (tuple(runners.split(", ")), sandboxes)
        for runners, sandboxes, names in rows
        for name in re.findall(r"\w+", names)
    }
    assert listed == {
        name: (attack.runners, "bubblewrap" if attack.needs else "bubblewrap, docker")
        for name, attack in attacks().items()
    }
