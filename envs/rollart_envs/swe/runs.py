"""How to run the tests of a task.

Takes: a task. Gives: a :class:`TestRun`. Never: runs it.

The row's ``test_command`` decides. If it directly calls pytest, ``python -m unittest``, sympy's
``bin/test`` or django's ``tests/runtests.py``, or is missing, the tests run under a reporter that
signs the result of each test. Any other command runs in a shell, and the framework's reader
(``logs.READERS``) reads its log. The row's ``framework`` sets the framework; by default the name of
the repository does.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Literal

from rollart_envs.rows import RowError
from rollart_envs.swe.logs import READERS, framework_of
from rollart_envs.swe.patch import file_changes
from rollart_envs.swe.task import RepairTask

_PYTEST: Final = ("-rA", "--color=no", "-p", "no:cacheprovider")
_SYMPY: Final = (("bin/test",), ("./bin/test",))
_DJANGO: Final = (("tests/runtests.py",), ("./tests/runtests.py",))
_PYTHONS: Final = ("python", "python3")
_SHELL: Final = frozenset("|&;<>()$`\\*?[#~%{\n")


@dataclass(frozen=True, slots=True)
class TestRun:
    """How tests are run and reported."""

    __test__ = False

    framework: str
    """A key of ``logs.READERS``: the format of ids."""
    runner: Literal["pytest", "unittest", "django", "sympy", "shell"]
    arguments: tuple[str, ...] = ()
    """Arguments of pytest or unittest."""
    command: str = ""
    """The shell command."""
    words: tuple[str, ...] = ()
    """Words of the row's command; those that are files of the repository run its tests."""

    @property
    def is_signed(self) -> bool:
        """Whether each result is signed, so that the log is not used."""
        return self.runner != "shell"


def test_run(task: RepairTask) -> TestRun:
    """Return how to run a task's tests.

    Raises:
        RowError: If the row does not determine it.
    """
    named = task.extra.get("framework")
    framework = str(named) if named else framework_of(task.repo)
    if framework not in READERS:
        raise RowError("framework", f"is {framework!r}; use one of {', '.join(READERS)}")
    files = test_files(task)
    if task.test_command is None:
        if framework == "sympy":
            raise RowError("test_command", "is missing; sympy's tests need a command of their own")
        return _signed(framework, (), files)
    words = _words(task.test_command)
    for start in (("pytest",), *((python, "-m", "pytest") for python in _PYTHONS)):
        if words[: len(start)] == start:
            return _signed(framework, words[len(start) :], files)
    for start in ((python, "-m", "unittest") for python in _PYTHONS):
        if words[: len(start)] == start and framework == "unittest":
            return _signed(framework, words[len(start) :], files)
    if framework == "sympy" and words[:1] in _SYMPY:
        return TestRun(framework, "sympy", words[1:], words=words)
    if framework == "unittest" and words[:1] in _DJANGO:
        return TestRun(framework, "django", words, words=words)
    return TestRun(framework, "shell", command=task.test_command, words=words)


test_run.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it as a test


def test_files(task: RepairTask) -> tuple[str, ...]:
    """Return the files with a task's tests: those of its test patch, and those in its ids."""
    changed = (change.new for change in file_changes(task.test_patch))
    patched = [path for path in changed if path is not None and _holds_tests(path)]
    return tuple(dict.fromkeys((*patched, *named_files(task))))


test_files.__test__ = False  # type: ignore[attr-defined]


def named_files(task: RepairTask) -> tuple[str, ...]:
    """Return the files in pytest's ids."""
    ids = (*task.fail_to_pass, *task.pass_to_pass)
    return tuple(dict.fromkeys(test.split("::")[0] for test in ids if "::" in test))


def _signed(framework: str, words: tuple[str, ...], files: tuple[str, ...]) -> TestRun:
    """Return a signed run; it runs the given files if the words name none."""
    if framework == "unittest":
        names = [word for word in words if not word.startswith("-")]
        return TestRun(framework, "unittest", tuple(names or map(_module, files)))
    named = [word for word in words if word.endswith(".py") or "::" in word or "/" in word]
    return TestRun(framework, "pytest", (*_PYTEST, *words, *(() if named else files)))


def _words(command: str) -> tuple[str, ...]:
    """Return a command's words; empty if the command needs a shell."""
    if _SHELL & set(command):
        return ()
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise RowError("test_command", f"is {command[:60]!r}, not a command: {error}") from None


def _holds_tests(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith(".py") and name not in ("__init__.py", "conftest.py")


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
