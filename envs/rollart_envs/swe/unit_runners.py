"""Run tests with unittest, django's program or sympy's conventions: one file for Python 3.8+.

Takes: a function that writes records, a guard, and the folders to import from; the runner's
arguments are in ``sys.argv``. Gives: one record per test. Never: runs a runner of the repository,
except django's set-up, which comes from the base commit.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from typing import Any, Callable


def unittest_result(write: Any, guard: Any, *, with_docs: bool) -> Any:
    """Return a result class that writes the worst status reported for each test.

    Its state is in closures, and its methods are in its objects, because the tested code can find
    the class through unittest's runner.
    """
    import unittest

    base = unittest.TextTestResult

    def hooks(result: Any) -> dict[str, Any]:
        said: list[str] = []
        seen: list[Any] = []

        def say(status: str) -> None:
            if not said or status in ("FAILED", "ERROR"):
                said[:] = [status]

        def startTest(test: Any) -> None:
            said.clear()
            seen.clear()
            guard.compare()
            method = getattr(test, getattr(test, "_testMethodName", ""), None)
            guard.expect_own(method)
            if method is not None and not inspect.iscoroutinefunction(method):
                setattr(test, test._testMethodName, observed(method, seen))
            base.startTest(result, test)

        def stopTest(test: Any) -> None:
            base.stopTest(result, test)
            guard.compare()
            vars(test).pop(getattr(test, "_testMethodName", ""), None)
            if seen and said[:1] in (["PASSED"], ["XPASS"]):
                guard.accuse("a test that failed is said to pass")
            described = test.shortDescription() if with_docs else None
            for name in (test.id(), described):
                if name:
                    write({"id": name, "status": said[0] if said else "ERROR"})

        def addSubTest(test: Any, subtest: Any, err: Any) -> None:
            base.addSubTest(result, test, subtest, err)
            if err is not None:
                say("FAILED")

        return {"startTest": startTest, "stopTest": stopTest, "addSubTest": addSubTest, "say": say}

    class Result(base):  # type: ignore[valid-type,misc]
        """Stores the worst status reported for each test."""

        def __init__(self, *rest: Any, **named: Any) -> None:
            super().__init__(*rest, **named)
            own = hooks(self)
            say = own.pop("say")
            self.__dict__.update(own, **says(base, self, say, write))

    return Result


_SAID = {
    "addSuccess": "PASSED",
    "addFailure": "FAILED",
    "addError": "ERROR",
    "addSkip": "SKIPPED",
    "addExpectedFailure": "XFAIL",
    "addUnexpectedSuccess": "XPASS",
}


def says(base: Any, result: Any, say: Any, write: Any) -> dict[str, Any]:
    """Return a result's methods that record a status."""

    def adding(name: str, status: str) -> Any:
        def add(test: Any, *rest: Any) -> None:
            getattr(base, name)(result, test, *rest)
            say(status)
            if not hasattr(test, "_testMethodName"):  # of a class or module as a whole
                write({"id": test.id(), "status": status})

        return add

    return {name: adding(name, status) for name, status in _SAID.items()}


def observed(method: Any, seen: list[Any]) -> Any:
    """Return a test's method that records whether it failed."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except BaseException:
            seen.append(True)
            raise

    return call


def run_unittest(write: Any, guard: Any, sources: list[str]) -> int:
    """Run the modules, classes or tests in the arguments."""
    import unittest

    result = prepared_unittest(write, guard, with_docs=False)
    look_in(sources)
    suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:])
    guard.compare()
    done = unittest.TextTestRunner(verbosity=2, resultclass=result).run(suite)
    return 0 if done.wasSuccessful() else 1


def prepared_unittest(write: Any, guard: Any, *, with_docs: bool) -> Any:
    """Load and watch unittest; return the result class."""
    import unittest
    import unittest.async_case
    import unittest.loader
    import unittest.mock
    import unittest.runner

    case: Any = unittest.TestCase
    function = case._getAssertEqualityFunc

    def chosen(self: Any, first: Any, second: Any) -> Any:
        guard.expect_honest(first, second)
        return function(self, first, second)

    case._getAssertEqualityFunc = chosen
    loader: Any = unittest.TestLoader
    loads = loader.loadTestsFromTestCase

    def loaded(self: Any, kind: Any) -> Any:
        suite = loads(self, kind)
        for test in suite:
            guard.expect_own(getattr(test, getattr(test, "_testMethodName", ""), None))
        return suite

    loader.loadTestsFromTestCase = loaded
    result = unittest_result(write, guard, with_docs=with_docs)
    unittest.TextTestRunner.resultclass = result
    guard.watch()
    return result


def run_django(write: Any, guard: Any, sources: list[str]) -> int:
    """Run the project's program that sets up its tests, with our result class."""
    import runpy

    os.environ["DJANGO_TEST_PROCESSES"] = "1"  # all tests in this process
    prepared_unittest(write, guard, with_docs=True)
    program = os.path.abspath(sys.argv[1])
    sys.argv = [program, *sys.argv[2:]]
    look_in([os.path.dirname(program), *sources])
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        return int(bool(ended.code))
    return 0


def run_sympy(write: Any, guard: Any, sources: list[str]) -> int:
    """Run each function ``test_*`` of the files as sympy's runner does without its cache."""
    os.environ.setdefault("SYMPY_USE_CACHE", "no")
    guard.watch()
    look_in(sources)
    failed = False
    for path in [word for word in sys.argv[1:] if word.endswith(".py")]:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        scope: dict[str, Any] = {"__name__": "__rollart_test__", "__file__": os.path.abspath(path)}
        tree = guard.guarded(ast.parse(source, path))
        code = guard.known(compile(tree, os.path.abspath(path), "exec", dont_inherit=True))
        exec(code, scope)
        for name, test in list(scope.items()):
            is_slow = getattr(test, "_slow", False)
            if name.startswith("test_") and inspect.isfunction(test) and not is_slow:
                status = sympy_status(guard, test)
                failed = failed or status in ("FAILED", "ERROR")
                write({"id": name, "status": status})
    return int(failed)


def sympy_status(guard: Any, test: Callable[[], Any]) -> str:
    """Run a sympy test and return its status."""
    guard.compare()
    guard.expect_own(test)
    status = "PASSED"
    try:
        found: Any = test()
        pairs: Any = found if inspect.isgenerator(found) else ()
        for item in pairs:
            item[0](*item[1:])
    except AssertionError:
        status = "FAILED"
    except Exception as error:
        known = {"Skipped": "SKIPPED", "XFail": "XFAIL", "XPass": "XPASS"}
        status = known.get(type(error).__name__, "ERROR")
    guard.expect_own(test)
    guard.compare()
    return status


def look_in(folders: list[str]) -> None:
    """Import from these folders from now on; the current one first, as ``python -m pytest`` does.

    Isolated Pythons have no folder of the program at the start of the path.
    """
    isolated = bool(sys.flags.isolated)
    sys.path[: 0 if isolated else 1] = [os.getcwd(), *folders]
