"""The tests that a package brings: run by pytest, in a child of ``rollart check``.

Takes: a project folder, which is the child's working directory. Gives: one result. Never: writes
pytest's cache into the project, or runs tests within tests: what the package's tests check
themselves is checked without them.
"""

from __future__ import annotations

import importlib.util
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollart_core.errors import first_line
from rollart_testing.results import CheckResult, SkipCheck, expect, run_check

if TYPE_CHECKING:
    import pytest

OWN_TESTS: Final = "own_tests"
UNDER_WAY: Final = "ROLLART_OWN_TESTS"
"""The environment variable that package's tests are run with."""
_FOLDERS: Final = ("tests", "test")


def why_none(folder: Path | None) -> str:
    """Return why there are no tests to run; empty when there are.

    Args:
        folder: Of the project; None: it is not one.
    """
    if folder is None:
        return "it is no project folder: a distribution holds no tests"
    if os.environ.get(UNDER_WAY):
        return "the package's own tests are running"
    return "" if _where(folder) else "the project has no tests"


def run_own_tests() -> CheckResult:
    """Run the tests of the project in the working directory, in this process."""
    return run_check(OWN_TESTS, _check)


def _check() -> str:
    if importlib.util.find_spec("pytest") is None:
        raise SkipCheck("pytest is not installed")
    import pytest

    counts = _Counts()
    os.environ[UNDER_WAY] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)  # those of the shell that the check was started in
    code = pytest.main(["-q", "-p", "no:cacheprovider", *_where(Path.cwd())], plugins=[counts])
    expect(not counts.failed, f"{len(counts.failed)} failed: {'; '.join(counts.failed[:2])}")
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or (code == 0 and not counts.num_passed):
        raise SkipCheck("no test of it ran")
    expect(code == 0, f"pytest ended with code {int(code)}")
    return f"{counts.num_passed} passed"


class _Counts:
    """A plugin of pytest that counts."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a phase of a test ended."""
        self.num_passed += report.when == "call" and report.passed
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what cannot be collected."""
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2]
            self.failed.append(f"{report.nodeid}: {first_line(said, 120)}")


def _where(folder: Path) -> list[str]:
    """Return what pytest is given: ``testpaths`` of pyproject.toml, or a folder of tests."""
    try:
        loaded = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        named = loaded["tool"]["pytest"]["ini_options"]["testpaths"]
    except (OSError, ValueError, KeyError, TypeError):
        named = []
    names = named.split() if isinstance(named, str) else named
    there = [str(name) for name in (*names, *_FOLDERS) if (folder / str(name)).is_dir()]
    return there[: len(names) or 1]
