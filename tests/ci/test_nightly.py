"""CONTRIBUTING lists every test that only `make nightly` runs, and what `.ci/run` runs instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lanes
import pytest

ROW = re.compile(r"\| `(\S+\.py::\w+)` \| ([^|]+) \| ([^|]+) \|")
SAME = "the same with "
HEADING = "### Nightly"
CASE = "pytest.param(2, marks=pytest.mark.nightly)"


def _mentions(node: ast.AST, names: set[str]) -> bool:
    """Return whether ``pytest.mark.nightly``, or a name that stands for it, is in an expression."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and one.attr == "nightly":
            return True
        if isinstance(one, ast.Name) and one.id in names:
            return True
    return False


def marked(source: str) -> dict[str, str]:
    """Return which tests of a file are nightly: the ``whole`` test, ``cases`` of it, or ``no``."""
    names: set[str] = set()
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if _mentions(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {one.id for one in targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            using = [one for one in node.decorator_list if _mentions(one, names)]
            by_case = all("parametrize" in ast.unparse(one) for one in using)
            found[node.name] = "no" if not using else "cases" if by_case else "whole"
    return dict.fromkeys(found, "whole") if "pytestmark" in names else found


def by_test(root: Path) -> dict[str, str]:
    """Return how each test is marked."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = str(path.relative_to(root / "tests"))
        found |= {f"{file}::{name}": how for name, how in marked(path.read_text("utf-8")).items()}
    return found


def rows(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table: the test, the reason, and its short form."""
    text = (root / "CONTRIBUTING.md").read_text("utf-8").partition(HEADING)[2]
    for line in text.partition("\n\nThe lane ")[0].splitlines():
        if line.startswith("| `"):
            row = ROW.fullmatch(line)
            assert row, f"not a row: {line}"
            yield row[1], row[2].strip(), row[3].strip()


def test_every_nightly_test_is_listed_and_no_other(repo_root: Path) -> None:
    nightly = sorted(name for name, how in by_test(repo_root).items() if how != "no")
    assert [test for test, _, _ in rows(repo_root)] == nightly


def test_every_nightly_test_has_a_short_form_in_ci(repo_root: Path) -> None:
    how = by_test(repo_root)
    for test, reason, short in rows(repo_root):
        assert reason
        if short.startswith(SAME):
            assert how[test] == "cases", f"{test} has no case in CI"
            continue
        name = short.strip("`")
        name = name if "::" in name else f"{test.partition('::')[0]}::{name}"
        assert how.get(name) in ("no", "cases"), f"{test}: CI does not run {name}"


def marks_of(lane: lanes.Lane) -> list[str]:
    """Return what each command of a lane gives pytest after ``-m``."""
    return [one[one.index("pytest") + 2] for one in lane.commands if "pytest" in one]


def test_the_lane_long_runs_every_nightly_test_once_and_agents_runs_none() -> None:
    assert marks_of(lanes.ALL["long"]) == ["nightly and not docker", "nightly and docker"]
    for name in ("ray", "docker", "sglang", "vllm", "agents"):
        assert marks_of(lanes.ALL[name])[0].endswith(" and not nightly")
    assert "or nightly" in marks_of(lanes.ALL["slow"])[0].partition("not (")[2]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@pytest.mark.nightly\ndef test_a(): ...\ndef test_b(): ...", ["whole", "no"]),
        (
            "@pytest.mark.parametrize('x', [1, param(2, marks=mark.nightly)])\ndef test_a(): ...",
            ["cases"],
        ),
        ("LONG = pytest.mark.nightly\n@LONG\ndef test_a(): ...", ["whole"]),
        (
            "X = [1, param(2, marks=mark.nightly)]\n@parametrize('x', X)\ndef test_a(): ...",
            ["cases"],
        ),
        ("pytestmark = [pytest.mark.nightly]\ndef test_a(): ...", ["whole"]),
    ],
)
def test_marks_are_found_however_they_are_written(source: str, expected: list[str]) -> None:
    assert list(marked(source).values()) == expected
