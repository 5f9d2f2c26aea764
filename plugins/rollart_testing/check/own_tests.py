"""Run a package's own tests with pytest in a child of ``rollart check``.

Takes: a project folder, which is the child's working directory. Gives: one result. Never: writes
pytest's cache into the project, or runs tests within tests: a check that starts in the package's
own tests skips them.
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
"""The environment variable that is set while a package's tests run."""
_FOLDERS: Final = ("tests", "test")


def why_none(folder: Path | None) -> str:
    """Return why there are no tests to run; empty if there are some.

    Args:
        folder: The project's folder; None if there is none.
    """
    if folder is None:
        return "it is not a project folder: a distribution holds no tests"
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
    os.environ.pop("PYTEST_ADDOPTS", None)  # options of the calling shell
    code = pytest.main(["-q", "-p", "no:cacheprovider", *_where(Path.cwd())], plugins=[counts])
    expect(not counts.failed, f"{len(counts.failed)} failed: {'; '.join(counts.failed[:2])}")
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or (code == 0 and not counts.num_passed):
        raise SkipCheck("none of its tests ran")
    expect(code == 0, f"pytest ended with code {int(code)}")
    return f"{counts.num_passed} passed"


class _Counts:
    """A pytest plugin that counts results."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test phase."""
        self.num_passed += report.when == "call" and report.passed
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a collection error."""
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2]
            self.failed.append(f"{report.nodeid}: {first_line(said, 120)}")


def _where(folder: Path) -> list[str]:
    """Return the arguments of pytest: ``testpaths`` of pyproject.toml, or a folder of tests."""
    try:
        loaded = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        named = loaded["tool"]["pytest"]["ini_options"]["testpaths"]
    except (OSError, ValueError, KeyError, TypeError):
        named = []
    names = named.split() if isinstance(named, str) else named
    there = [str(name) for name in (*names, *_FOLDERS) if (folder / str(name)).is_dir()]
    return there[: len(names) or 1]
