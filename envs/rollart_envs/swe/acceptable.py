"""Filter a patch: changes to the test runner or to the tests are left out.

Takes: a task and a patch. Gives: the patch without those files, and their paths. Never: leaves out
a file that the task's own patch changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Final

from rollart_envs.rows import RowError
from rollart_envs.swe.patch import steers_the_runner, touched_files, without_files
from rollart_envs.swe.repository import TaskFailure
from rollart_envs.swe.runs import TestRun, named_files, test_files, test_run
from rollart_envs.swe.task import RepairTask

_STEERS_TOO: Final = frozenset(("pyproject.toml", "pytest.py", "unittest.py"))
_FRAMEWORK_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "django": ("django/test/", "tests/runtests.py"),
    "sympy": ("bin/test", "sympy/testing/", "sympy/utilities/runtests.py"),
}
"""Files with these prefixes run the tests of a project that has its own runner."""
_TEST_FOLDERS: Final = frozenset(("test", "tests", "testing"))


def run_of(task: RepairTask) -> TestRun:
    """Return how to run a task's tests.

    Raises:
        TaskFailure: If the row does not determine it.
    """
    try:
        return test_run(task)
    except RowError as error:
        raise TaskFailure(f"{task.instance_id}: {error}", boundary="swe.task") from None


def acceptable(task: RepairTask, patch: str) -> tuple[str, tuple[str, ...]]:
    """Return a patch without the files it must not change, and the paths that are left out."""
    forbidden = _forbidden(task)
    left_out = tuple(path for path in touched_files(patch) if forbidden(path))
    return (without_files(patch, forbidden) if left_out else patch), left_out


def _forbidden(task: RepairTask) -> Callable[[str], bool]:
    own = set(touched_files(task.patch))
    tests, folders = tests_of(task)
    beside = {str(PurePosixPath(path).parent) for path in tests}
    beside -= {folder for path in own for folder in _parents(path)}
    run = run_of(task)
    programs = {PurePosixPath(word.removeprefix("./")).as_posix() for word in run.words}
    framework_files = _FRAMEWORK_FILES.get(run.runner, ())

    def forbidden(path: str) -> bool:
        if path in own:
            return False
        steers = steers_the_runner(path) or PurePosixPath(path).name in _STEERS_TOO
        steers = steers or path in programs or path.startswith(framework_files)
        data = not path.endswith(".py") and str(PurePosixPath(path).parent) in beside
        return steers or data or path in tests or not folders.isdisjoint(_parents(path))

    return forbidden


def tests_of(task: RepairTask) -> tuple[set[str], set[str]]:
    """Return the files of a task's tests, and the folders that contain only test files."""
    own = set(touched_files(task.patch))
    tests = {*touched_files(task.test_patch), *named_files(task), *test_files(task)} - own
    folders = {folder for path in tests if (folder := _test_folder(path))}
    return tests, folders - {folder for path in own for folder in _parents(path)}


def _test_folder(path: str) -> str:
    """Return the outermost test folder that a file is in; empty if there is none."""
    parts = PurePosixPath(path).parts[:-1]
    for depth, name in enumerate(parts, start=1):
        if name in _TEST_FOLDERS:
            return "/".join(parts[:depth])
    return ""


def _parents(path: str) -> set[str]:
    return {str(parent) for parent in PurePosixPath(path).parents}
