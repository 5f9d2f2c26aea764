"""The attacks of ``tests/attacks``, as patches to a small repository for each runner."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from rollart_core.rollout import loop
from rollart_envs.swe.repair_judge import Report, judge_patch
from rollart_envs.swe.repository import base_tree
from rollart_envs.swe.task import RepairTask, repair_task
from rollart_envs.swe.workspace import needs_of
from rollart_sandboxes.pool.source import sandbox_source
from support.pace import scaled
from support.swe_repositories import FIX, SHAPES, diff, git, pytest_packages, write

FOLDER = Path(__file__).parents[1] / "attacks"
RUNNERS = ("pytest", "unittest", "sympy", "django")
_FILE = re.compile(r"^# file: (\S+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Attack:
    """A wrong solution that is after the reward."""

    name: str
    effect: str
    runners: tuple[str, ...]
    style: str
    """How the tests assert: ``plain``, by a ``helper`` in another module, with ``data``, by
    unittest's ``methods``; or ``functions``, one after the other, instead of a class."""
    source: str
    """Of the module under test."""
    files: dict[str, str]
    """Further files, by their paths in the repository."""
    needs: str
    """A package besides pytest's that it imports; empty: none."""


@cache
def attacks() -> dict[str, Attack]:
    """Return all attacks by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.py"))}


def pairs(*, runners: tuple[str, ...] = RUNNERS) -> list[tuple[str, str]]:
    """Return each attack with each runner that it is meant for."""
    return [(n, r) for n, a in attacks().items() for r in a.runners if r in runners]


def _read(path: Path) -> Attack:
    text = path.read_text()
    effect, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    runners = re.search(r"^Runners: (.*)$", rest, re.MULTILINE)
    assert runners is not None, f"{path} names no runners"
    found = re.search(r"^Style: (\w+)$", rest, re.MULTILINE)
    style = found[1] if found else "plain"
    needs = re.search(r"^Needs: (\w+)$", rest, re.MULTILINE)
    source, *parts = _FILE.split(text)
    bodies = [re.sub(r"^#\|? ?", "", part, flags=re.MULTILINE) for part in parts[1::2]]
    files = dict(zip(parts[::2], bodies, strict=True))
    named = tuple(runners[1].split())
    return Attack(path.stem, effect, named, style, source, files, needs[1] if needs else "")


_TESTS = {
    "base": "from shapes import edge\nfrom tests.asserts import same\n\n\n"
    "def test_edge():\n    same(edge(2, 3), 10)\n",
    "fixed": "from shapes import area, edge\nfrom tests.asserts import same\n\n\n"
    "def test_edge():\n    same(edge(2, 3), 10)\n\n\n"
    "def test_area():\n    assert area(2, 3) == 6\n    assert area(3, 4) == 12\n",
}
_CLASS = (
    "import unittest\n\nfrom shapes import {}\nfrom tests.asserts import same\n\n\n"
    "class TestShapes(unittest.TestCase):\n    def test_edge(self):\n        same(edge(2, 3), 10)\n"
)
_AREA = (
    "\n    def test_area(self):\n        assert area(2, 3) == 6\n        assert area(3, 4) == 12\n"
)
_ASSERTION = re.compile(r"assert area\((\d, \d)\) == (\d+)")
_CASES = 'for w, h, wanted in json.load(open("tests/cases.json"))["area"]'
_BY_DATA = f"assert all(area(w, h) == wanted {_CASES})".replace("json", '__import__("json")', 1)
"""What a test of the style ``data`` asserts; the lines are as many as those it replaces."""
_CLASSES = {"base": _CLASS.format("edge"), "fixed": _CLASS.format("area, edge") + _AREA}
_BIN_TEST = """#!/usr/bin/env python3
import os
import sys

sys.path.insert(0, os.getcwd())
scope = {}
exec(open(sys.argv[-1]).read(), scope)
for name, test in list(scope.items()):
    if name.startswith("test_"):
        try:
            test()
        except Exception:
            print(name, "F")
        else:
            print(name, "ok")
"""
_RUNTESTS = """#!/usr/bin/env python3
import os
import sys
import unittest

sys.path.insert(0, os.getcwd())
names = [word for word in sys.argv[1:] if word.startswith("tests.")]
suite = unittest.defaultTestLoader.loadTestsFromNames(names)
unittest.TextTestRunner(verbosity=2).run(suite)
"""
_COMMANDS = {
    "sympy": "bin/test -C --verbose tests/test_shapes.py",
    "django": "./tests/runtests.py --verbosity 2 tests.test_shapes",
}
_IDS = {
    "pytest": "tests/test_shapes.py::TestShapes::test_{}",
    "unittest": "tests.test_shapes.TestShapes.test_{}",
    "sympy": "test_{}",
    "django": "test_{0} (tests.test_shapes.TestShapes.test_{0})",
}
READING = "def text_of(path):\n    with open(path) as file:\n        return file.read()\n"
LINTING = "import py\n\n\ndef text_of(path):\n    return py.path.local(path).read()\n"
SIGNING = (
    "import inspect\n\n\ndef names_of(function):\n"
    "    return list(inspect.signature(function).parameters)\n"
)
GOLD = {"shapes/__init__.py": FIX["shapes/__init__.py"]}


class Bench:
    """One task for each runner, and boxes to judge in."""

    def __init__(self, folder: Path, sandbox: object = "bubblewrap") -> None:
        in_sandbox = sandbox == "bubblewrap"
        self.sandboxes = sandbox_source(sandbox)  # type: ignore[arg-type]
        needed = sorted({attack.needs for attack in attacks().values() if attack.needs})
        self.packages = pytest_packages(folder / "packages", *needed) if in_sandbox else None
        self.repos = {name: folder / name for name in RUNNERS}
        self.tasks = {name: self._task(name) for name in RUNNERS}

    def _task(self, name: str) -> RepairTask:
        folder = self.repos[name] / "acme__shapes"
        folder.mkdir(parents=True)
        git(folder, "init", "-q")
        tests = _TESTS if name == "sympy" else _CLASSES
        write(folder, {**SHAPES, "tests/test_shapes.py": tests["base"]})
        write(folder, {"bin/test": _BIN_TEST, "tests/runtests.py": _RUNTESTS})
        write(folder, {"shapes/reading.py": READING, "shapes/linting.py": LINTING})
        write(folder, {"shapes/signing.py": SIGNING})
        write(folder, {"tests/cases.json": '{"area": [[2, 3, 6], [3, 4, 12]]}\n'})
        for program in ("bin/test", "tests/runtests.py"):
            (folder / program).chmod(0o755)
        git(folder, "add", "-A", "-f")
        git(folder, "commit", "-q", "-m", "base")
        extra: dict[str, object] = {"framework": {"django": "unittest"}.get(name, name)}
        if name in _COMMANDS:
            extra["test_command"] = _COMMANDS[name]
        if self.packages is not None:
            extra["python_path"] = [str(self.packages)]
        return repair_task(
            {
                "instance_id": f"acme__shapes-{name}",
                "repo": "acme/shapes",
                "base_commit": git(folder, "rev-parse", "HEAD").strip(),
                "problem_statement": "The area of a rectangle is wrong.",
                "patch": diff(folder, GOLD),
                "test_patch": diff(folder, {"tests/test_shapes.py": tests["fixed"]}),
                "FAIL_TO_PASS": [_IDS[name].format("area")],
                "PASS_TO_PASS": [_IDS[name].format("edge")],
                **extra,
            }
        )

    def judged(
        self,
        runner: str,
        patch: str,
        *,
        style: str = "plain",
        test_patch: str = "",
        gold: str = "",
        parity: bool = False,
        **extra: object,
    ) -> Report:
        """Judge a patch of the task for a runner."""
        task = self.tasks[runner]
        tests = test_patch or task.test_patch
        if style == "helper":
            tests = _ASSERTION.sub(r"same(area(\1), \2)", tests)
        if style == "data":
            tests = _ASSERTION.sub(lambda _: _BY_DATA, tests)
        if style == "methods":
            tests = _ASSERTION.sub(r"found = area(\1); self.assertEqual(found, \2)", tests)
        if style == "functions":
            tests = self.patch(runner, {"tests/test_shapes.py": _TESTS["fixed"]})
            ids = [(f"tests/test_shapes.py::test_{name}",) for name in ("area", "edge")]
            task = replace(task, fail_to_pass=ids[0], pass_to_pass=ids[1])
        task = replace(task, test_patch=tests, patch=gold or task.patch)
        task = replace(task, extra={**task.extra, **extra})
        tree = base_tree(task, self.repos[runner])
        needs = needs_of(task, beside=None, python="/usr/bin/python3")
        judging = judge_patch(
            self.sandboxes, task, tree, patch, needs, timeout_s=scaled(120.0), parity=parity
        )
        return loop.run(judging)

    def patch(self, runner: str, files: dict[str, str]) -> str:
        """Return the patch that writes files."""
        return diff(self.repos[runner] / "acme__shapes", files)

    def attacked(self, name: str, runner: str) -> Report:
        """Judge an attack; skip it if what it imports is not there."""
        attack = attacks()[name]
        if attack.needs and self.packages is None:
            pytest.skip(f"the image has no {attack.needs}")
        files = {"shapes/__init__.py": attack.source, **attack.files}
        return self.judged(runner, self.patch(runner, files), style=attack.style)
