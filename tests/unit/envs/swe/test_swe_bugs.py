"""Bugs, hidden tests and statements of SWE tasks, on text alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart_envs.swe import probe
from rollart_envs.swe.hide import test_name as name_of
from rollart_envs.swe.hide import without_tests
from rollart_envs.swe.make import (
    Baseline,
    Bounds,
    Works,
    candidates,
    changes_of,
    is_test_file,
    shown_by,
)
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.mutate import KINDS, is_another_program, mutated, mutations
from rollart_envs.swe.statement import Shown, changed_lines, leaked, statement
from rollart_envs.swe.suite import Failed, Script, Suite, Tried
from rollart_sandboxes.pool.source import sandbox_source

SOURCE = '''\
import functools


class Box:
    """A box that is < 3."""

    limit = 3

    @functools.cache
    def put(self, item: int = 1, *rest) -> int:
        """Put 1 item, if len(x) < 2."""
        if item < self.limit and item:   # a guard
            raise ValueError("é no", f"{item + 1}")
        for n in range(len(rest)):
            if n == 2:
                continue
            self.items.append(n - 1)
        else:
            self.items = min(rest, key=-1)
        return swap(item, rest[1:])


def swap(a, b):
    if not a:
        return b, a
    return a
'''


def bugs(kind: str) -> set[str]:
    """Return the lines that each bug of a kind leaves in place of the old ones."""
    found = set()
    for bug in mutations(SOURCE):
        if bug.kind == kind:
            lines = mutated(SOURCE, [bug]).splitlines()
            found |= {line.strip() for line in lines} - {s.strip() for s in SOURCE.splitlines()}
    return found


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("comparison", "if item <= self.limit and item:   # a guard"),
        ("arithmetic", "self.items.append(n + 1)"),
        ("boolean", "if item < self.limit or item:   # a guard"),
        ("condition", "if not (item < self.limit and item):   # a guard"),
        ("constant", "if n == 3:"),
        ("sign", "self.items = min(rest, key=1)"),
        ("bound", "for n in range(len(rest) - 1):"),
        ("returned", "return a, b"),
        ("arguments", "return swap(rest[1:], item)"),
        ("sibling", "self.items = max(rest, key=-1)"),
        ("error", 'raise TypeError("é no", f"{item + 1}")'),
        ("jump", "break"),
        ("missing", "pass"),
    ],
)
def test_each_kind_of_bug_changes_what_it_should(kind: str, line: str) -> None:
    assert line in bugs(kind)


def test_there_is_a_test_of_each_kind() -> None:
    assert {bug.kind for bug in mutations(SOURCE)} == set(KINDS)


def test_a_bug_touches_only_code_of_functions() -> None:
    for bug in mutations(SOURCE):
        other = mutated(SOURCE, [bug])
        assert '"""A box that is < 3."""\n\n    limit = 3\n' in other
        assert '"""Put 1 item, if len(x) < 2."""' in other
        assert "@functools.cache\n    def put(self, item: int = " in other
        if bug.kind != "missing":
            assert 'f"{item + 1}"' in other


def test_a_bug_names_the_line_where_its_functions_code_begins() -> None:
    namespace: dict[str, object] = {}
    code = compile(SOURCE, "source", "exec", dont_inherit=True)
    exec(code, namespace)
    put = vars(namespace["Box"])["put"].__wrapped__
    assert {bug.function_line for bug in mutations(SOURCE) if bug.function == "Box.put"} == {
        put.__code__.co_firstlineno
    }


def test_most_bugs_are_programs_and_none_is_the_same() -> None:
    others = [mutated(SOURCE, [bug]) for bug in mutations(SOURCE)]
    assert all(is_another_program(SOURCE, other) for other in others)
    assert not is_another_program(SOURCE, SOURCE + "\n# a note\n")
    assert not is_another_program(SOURCE, SOURCE + "\nreturn (\n")


def test_line_ends_stay_as_they_are() -> None:
    source = "def f(a):\r\n    b = 'ü', a < 1\r\n    return b\r\n"
    (less,) = [b for b in mutations(source) if b.new == "<="]
    assert mutated(source, [less]) == source.replace("<", "<=")


def test_several_bugs_are_put_in_together_unless_they_overlap() -> None:
    source = "def f(a):\n    return a < 1 + 2\n"
    found = {bug.new: bug for bug in mutations(source)}
    assert mutated(source, [found["<="], found["-"]]) == "def f(a):\n    return a <= 1 - 2\n"
    with pytest.raises(ValueError, match="overlap"):
        mutated(source, [found["None"], found["-"]])


TESTS = '''\
import pytest


class TestA:
    """Tests of a."""

    @pytest.mark.parametrize("x", [1, 2])
    def test_one(self, x):
        assert x

    def test_two(self):
        pass


def test_three():
    assert True
'''


def test_tests_are_taken_out_and_nothing_else() -> None:
    left = without_tests(TESTS, ["TestA::test_one"])
    assert left is not None
    assert "parametrize" not in left
    assert "def test_two" in left
    assert "def test_three" in left
    whole = without_tests(TESTS, ["TestA::test_one", "TestA::test_two"])
    assert whole is not None
    assert "TestA" not in whole
    assert [type(node).__name__ for node in ast.parse(whole).body] == ["Import", "FunctionDef"]


@pytest.mark.parametrize("odd", ["\x0c", "\x0b", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\r"])
def test_lines_are_counted_as_python_counts_them(odd: str) -> None:
    helper = f"import os\n# a{odd}# b\ndef helper():\n    return 1\n\n"
    secret, kept = (
        "def test_secret():\n    assert helper() == 2\n",
        "def test_keep():\n    pass\n",
    )
    assert without_tests(helper + secret + kept, ["test_secret"]) == helper + kept
    (none,) = [bug for bug in mutations(helper) if bug.kind == "returned"]
    assert mutated(helper, [none]) == helper.replace("return 1", "return None")


def test_a_test_that_is_written_twice_is_not_taken_out_once() -> None:
    twice = "def test_a():\n    assert x == 1\n\ndef test_a():\n    pass\n"
    assert without_tests(twice, ["test_a"]) is None


def test_what_cannot_be_taken_out_by_lines_is_said() -> None:
    assert without_tests(TESTS, ["TestA::test_inherited"]) is None
    assert without_tests("def test_(:", ["test_"]) is None
    assert without_tests("if 1:\n    def test_a(): pass\n", ["test_a"]) is None


def test_an_id_gives_its_file_and_name() -> None:
    assert name_of("a/test_b.py::T::test_c[x::y[]]") == ("a/test_b.py", "T::test_c")


def test_test_files_are_known_by_their_paths() -> None:
    tests = (
        "tests/data.json",
        "a/test/x.py",
        "test_a.py",
        "src/a_test.py",
        "conftest.py",
        "test.py",
    )
    assert all(map(is_test_file, tests))
    assert not any(map(is_test_file, ("a/b.py", "contest.py", "testing.py", "latest/a.py")))


PATCH = """\
--- a/box.py
+++ b/box.py
@@ -1,3 +1,3 @@
 def area(w, h):
-    return w + h
+    return w * h
     pass
"""


def test_a_statement_notifies_of_failures_and_not_of_the_patch() -> None:
    failures = {
        "t.py::TestBox::test_area_of_two": Failed(
            "AssertionError: assert 5 == 6\n +  where 5 = <function area at 0x7f00deadbeef>(2, 3)\n"
            "the code says return  w + h",
            "Areas are products.\n\nThis is\nnot shown.",
            ("box.area(2, 3) == 6",),
        )
    }
    text = statement("box", failures, PATCH, never=("1a2b3c4",))
    for told in ("Box: area of two", "Areas are products.", "box.area(2, 3) == 6", "5 == 6"):
        assert told in text
    assert "where 5 = area(2, 3)" in text
    assert "w + h" not in text
    assert "not shown" not in text
    assert not leaked(text, PATCH)
    hidden = statement("box", failures, PATCH, never=("products",))
    assert "products" not in hidden


def test_a_statement_shows_few_tests_and_counts_the_rest() -> None:
    failures = {f"t.py::test_{n}[{k}]": Failed("E: no") for n in range(7) for k in range(3)}
    text = statement("box", failures, PATCH)
    assert text.count("## ") == 4
    assert "3 more checks of the same behaviour fail." in text


def test_changed_lines_leave_out_what_says_nothing() -> None:
    assert changed_lines(PATCH + "+    pass\n+    else:\n-)\n") == ("return w + h", "return w * h")
    assert leaked("first\n  return  w *  h  now", PATCH) == ("return w * h",)
    assert leaked("we return w * height", PATCH) == ()


def test_a_statement_may_name_what_a_line_of_the_patch_only_names() -> None:
    patch = PATCH + "+    partition_all,\n+    (interleave)\n+    'secret',\n+    area(w)\n"
    assert leaked("partition_all and interleave", patch) == ()
    assert leaked("'secret', and area(w)", patch) == ("'secret',", "area(w)")


class Unit:
    def assertEqual(self, a: object, b: object) -> None:
        assert a == b

    def assertTrue(self, a: object) -> None:
        assert a


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("assert len(x) == y", ["len('ab') == 3"]),
        ("unit.assertEqual(len(x), y)", ["len('ab') == 3"]),
        ("unit.assertTrue(all(z))", ["all([0])"]),
        ("assert [len(x) for x in (x,)] == y", ["[len(x) for x in (x,)] == 3"]),
    ],
)
def test_what_was_expected_is_told_with_values(
    line: str, expected: list[str], tmp_path: Path
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(line)
    with pytest.raises(AssertionError) as raised:
        exec(compile(line, str(test), "exec"), {"x": "ab", "y": 3, "z": [0], "unit": Unit()})
    assert probe.tried(raised.value.__traceback__, str(test)) == expected


def test_the_probe_is_one_file_for_python_3_8() -> None:
    source = Path(probe.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    names = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"pytest"}


def test_expectations_of_an_error_name_it() -> None:
    (node,) = ast.parse("with pytest.raises(ValueError, match='x'):\n    f(1)\n").body
    assert list(probe.expected(node)) == ["f(1)  # raises ValueError"]


TESTS_TO_REPEAT = """\
import unittest
import json as js
from json import *
import pytest

LIMIT = 3


def helper(x):
    return x + LIMIT


class TestA(unittest.TestCase):
    def setUp(self):
        self.limit = 4
        self.other = object()

    def test_call(self):
        self.assertEqual(helper(self.limit), 8)

    def test_values(self):
        found = helper(1)
        self.assertEqual(found, 5)

    def test_raises(self):
        with self.assertRaises(ValueError):
            helper(2)

    @staticmethod
    def twice(x):
        return 2 * x

    def test_static(self):
        self.assertEqual(list(map(TestA.twice, [self.limit])), [self.twice(5)])

    def test_error(self):
        number = int("four")

    def test_message(self):
        with self.assertRaisesRegex(ValueError, "f..r"):
            int("five")

    def test_with(self):
        with open(__file__) as file:
            file.read("all")

    def test_parts(self):
        for number in (0, 2):
            with self.subTest(number=number):
                self.assertEqual(helper(number), 3)

    def test_nested(self):
        def twice_is(x, y):
            assert 2 * x == y
        twice_is(abs(2), 4)
        twice_is(abs(3), 5)

    def test_object(self):
        self.assertEqual(len(str(self.other)), 8)


@pytest.mark.parametrize("n", [1])
def test_loop(n):
    rest = iter([1, 2, 3])
    next(rest)
    for k in (1, 2):
        assert [next(rest)] == [n] * k


def test_star():
    assert dumps({}) == js.dumps([])
"""


def repeated(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Return test -> the script of the probe, from a run of pytest in another process."""
    (tmp_path / "test_repeated.py").write_text(TESTS_TO_REPEAT)
    report = tmp_path / "report.jsonl"
    subprocess.run(
        [sys.executable, str(probe.__file__), "-q", "-p", "no:cacheprovider", "test_repeated.py"],
        input=json.dumps({"path": str(report), "calls": False}).encode() + b"\n",
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    records = [json.loads(line) for line in report.read_text().splitlines()]
    tests = [r for r in records if "id" in r]
    assert {r["status"] for r in tests} == {"FAILED"}
    return {r["id"].split("::")[-1]: r.get("script", {}) for r in tests}


def test_a_failing_test_becomes_a_script_with_all_that_it_needs(tmp_path: Path) -> None:
    scripts = repeated(tmp_path)
    helper = "LIMIT = 3\n\ndef helper(x):\n    return x + LIMIT"
    call = scripts["test_call"]
    assert call["check"] == "assert helper(4) == 8"
    assert call["values"] == ["helper(4)", "helper(4) == 8"]
    assert call["setup"].replace("\n\n", "\n") == helper.replace("\n\n", "\n")
    assert scripts["test_values"]["setup"].endswith("found = helper(1)")
    assert scripts["test_values"]["check"] == "assert found == 5"
    assert scripts["test_raises"]["check"].startswith("try:\n    helper(2)\nexcept ValueError:")
    assert (scripts["test_raises"]["values"], scripts["test_raises"]["raises"]) == (
        ["helper(2)"],
        "`ValueError`",
    )
    static = scripts["test_static"]
    assert static["setup"] == "def twice(x):\n    return 2 * x"
    assert static["check"] == "assert list(map(twice, [4])) == [twice(5)]"
    assert scripts["test_error"]["values"] == ["int('four')"]
    message = scripts["test_message"]
    assert message["raises"] == "`ValueError` with a message that matches `'f..r'`"
    assert scripts["test_with"]["setup"] == "__file__ = 'test_repeated.py'"
    assert "twice_is(abs(2), 4)" not in scripts["test_nested"]["setup"]
    for name, error in (("message", ValueError), ("nested", AssertionError)):
        with pytest.raises(error):
            exec(scripts[f"test_{name}"]["setup"] + "\n" + scripts[f"test_{name}"]["check"], {})
    assert scripts["test_object"] == {}  # no script can have its object
    loop = scripts["test_loop[1]"]["setup"]
    assert "n = 1" in loop
    assert loop.endswith("rest = iter([1, 2, 3])\nnext(rest)")
    star = scripts["test_star"]["setup"]
    assert set(star.splitlines()) == {"import json as js", "from json import dumps"}
    for name in ("test_call", "test_values", "test_raises", "test_star"):
        with pytest.raises(AssertionError):
            exec(scripts[name]["setup"] + "\n" + scripts[name]["check"], {})


def test_a_comparison_of_plain_values_is_no_expectation() -> None:
    (statement_,) = ast.parse("self.assertEqual(1, 2)").body
    assert list(probe.expected(statement_)) == []


def shown(number: int) -> Shown:
    value = f"f({number})"
    return Shown(Script("from shelf import f", f"assert {value} == 1", (value,)), value, "0", "1")


@pytest.mark.parametrize(
    ("bad", "good", "raises", "told"),
    [
        (
            ("1", "False"),
            ("2", "True"),
            "",
            "`f()` gives:\n\n```\n1\n```\n\nIt should give:\n\n```\n2",
        ),
        (("<a at 0x1>", "False"), ("<a at 0x2>", "True"), "", "`f() == 2` gives:\n\n```\nFalse"),
        (("", ""), ("2", "True"), "", "`f()` fails with:\n\n```\nE: no\n```\n\nIt should give"),
        (
            ("", ""),
            ("<a at 0x1>", "2" * 999),
            "",
            "It fails with:\n\n```\nE: no\n```\n\nIt should end",
        ),
        (
            ("1", "True"),
            ("", ""),
            "`OSError`",
            "`f()` gives:\n\n```\n1\n```\n\nIt should raise `OSError`.",
        ),
        (
            ("", ""),
            ("", ""),
            "`OSError`",
            "`f()` fails with:\n\n```\nE: no\n```\n\nIt should raise",
        ),
    ],
)
def test_what_a_script_shows(
    bad: tuple[str, str], good: tuple[str, str], raises: str, told: str
) -> None:
    script = Script("", "assert f() == 2", ("f()", "f() == 2"), raises)
    text = "\n".join(shown_by(script, Tried("E: no", bad), Tried("", good)).lines())
    assert told in text


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("test_a.py::TestSymbols::test_at_n_t", "Symbols: at n t"),
        ("test_a.py::TestsOfCut::test", "Of Cut: test"),
        ("test_a.py::test_slug[x]", "slug"),
        ("test_a.py::tests_end_test", "end"),
    ],
)
def test_a_heading_has_the_words_of_a_test(test: str, words: str) -> None:
    assert f"## {words}\n" in statement("shelf", {test: Failed("E: no")}, "")


def test_a_statement_shows_a_script_of_each_bug() -> None:
    failures = {f"tests/test_a.py::test_{n}": Failed(f"E{n}: no") for n in range(9)}
    shows = {f"tests/test_a.py::test_{n}": shown(n) for n in (6, 7, 8)}
    of_bugs = [{"tests/test_a.py::test_1"}, {"tests/test_a.py::test_8", "tests/test_a.py::test_0"}]
    text = statement("shelf", failures, "", shows=shows, of_bugs=of_bugs)
    assert "E1: no" in text
    assert "from shelf import f\n\nassert f(8) == 1\n```\n\n`f(8)` gives:\n\n```\n0\n```" in text
    assert "It should give:\n\n```\n1\n```" in text
    assert "E0: no" not in text
    assert "E2: no" not in text


def test_a_script_with_a_line_of_the_patch_is_not_shown() -> None:
    patch = "--- a/shelf.py\n+++ b/shelf.py\n@@ -1 +1 @@\n-x = 2\n+assert f(3) == 1\n"
    failures = {"tests/test_a.py::test_3": Failed("E3: no")}
    text = statement("shelf", failures, patch, shows={"tests/test_a.py::test_3": shown(3)})
    assert "f(3)" not in text
    assert "E3: no" in text


def works(tmp_path: Path, **options: Any) -> Works:
    folder = tmp_path / "package"
    for name in ("shelf.py", "tools/run.py", "setup.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("def f(a, b):\n    return a < b\n\n\ndef g(a):\n    return -a\n")
    mirror = Mirror.init(tmp_path / "mirror.git")
    commit = mirror.commit_folder(folder, "base")
    paths = ("shelf.py", "tools/run.py", "setup.py")
    callers = {(path, line): frozenset({"t"}) for path in paths for line in (1, 5)}
    baseline = Baseline(frozenset({"t"}), callers, (), 1.0)
    suite = Suite(sandbox_source("process"), "")

    async def nobody(row: object) -> str:
        raise AssertionError

    return Works("shelf", "1", "shelf", mirror, commit, suite, baseline, nobody, **options)


@pytest.mark.parametrize("library", [frozenset(), frozenset({"shelf.py"})])
def test_bugs_are_in_the_library_only_and_in_one_task_only(
    tmp_path: Path, library: frozenset[str]
) -> None:
    found = list(candidates(works(tmp_path, bounds=Bounds(several=0.7), library=library), 1))
    assert {one.path for one in found} == {"shelf.py"}
    bugs = [bug for one in found for bug in one.bugs]
    assert any(len(one.bugs) > 1 for one in found)
    assert len(set(bugs)) == len(bugs)
    source = "def f(a, b):\n    return a < b\n\n\ndef g(a):\n    return -a\n"
    programs = [ast.dump(ast.parse(mutated(source, [bug]))) for bug in bugs]
    assert len(set(programs)) == len(programs)


def test_changes_of_patches_are_compared_one_by_one() -> None:
    head = "diff --git a/s.py b/s.py\n--- a/s.py\n+++ b/s.py\n"
    one = f"{head}@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
    both = f"{head}@@ -1,4 +1,4 @@\n-a\n+b\n c\n-d\n+e\n"
    assert changes_of(one) == {"s.py\n-a\n+b"}
    assert changes_of(one) < changes_of(both)
    assert changes_of(one.replace("s.py", "t.py")).isdisjoint(changes_of(both))
