r"""Runs tests and writes what became of each: a single file for any Python from 3.8.

Takes: one JSON line on stdin when run as a program, with the runner's own arguments behind it:
``{"nonce": ..., "path": ..., "runner": "pytest" or "unittest", "packages": [...], "sources":
[...]}``, the last two being folders for ``sys.path``; or, loaded by
pytest's ``-p`` from a folder outside the repository, the variables ROLLART_REPORT_NONCE and
ROLLART_REPORT_PATH. Gives: a file of JSON lines, each numbered and signed with the nonce, the last
one with pytest's exit code (of unittest: 0 or 1). Never: prints, or writes the nonce anywhere.

    printf '{"nonce": "...", "path": "/box/report"}\n' | python -I /box/report_plugin.py -rA tests/

As a program it imports the runner from the packages, before the repository is on the path: no
``pytest.py`` of the agent's stands in for it. What a test prints is no report; what ends the
process early leaves a report without an end, and that counts as no report at all; so does a runner
whose functions are others at the end than they were before the repository's code was loaded. What
it cannot hold: the agent's code runs in the same process, and code that is written against this
very plugin can find it in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import types
from typing import Any

TAMPERED = 71
"""The end of a run whose runner was changed meanwhile."""
RUNNERS = ("unittest", "_pytest", "pluggy")


class Reporter:
    """Follows pytest's reports and writes one signed line a test."""

    def __init__(self, nonce: str, path: str) -> None:
        self._sign = hmac.new(nonce.encode(), digestmod=hashlib.sha256).copy
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._count = 0
        self._config: Any = None
        self._statuses: dict[str, str] = {}
        self._runner: dict[Any, Any] = {}

    def pytest_load_initial_conftests(self) -> None:
        """Look at the runner: plugins are loaded and may have changed it, conftests are not."""
        self.watch()

    def pytest_configure(self, config: Any) -> None:
        """Keep the config, which knows how pytest prints ids."""
        self._config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the report of a test's setup, call or teardown."""
        status = status_of(report)
        if status is not None:
            self._statuses[report.nodeid] = status

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write what became of a test."""
        status = self._statuses.pop(nodeid, None)
        if status is not None:
            self.write({"id": self._id(nodeid), "status": status})

    def pytest_collectreport(self, report: Any) -> None:
        """Write that a file could not be collected."""
        if report.failed:
            self.write({"id": self._id(report.nodeid), "status": "ERROR"})

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """Write the end: without it nothing counts."""
        self.end(int(exitstatus))

    def watch(self) -> None:
        """Note what the runner's functions are."""
        self._runner = functions()

    def end(self, code: int) -> None:
        """Write the end."""
        now = functions()
        same = all(now.get(key) is code for key, code in self._runner.items())
        self.write({"end": code if same else TAMPERED})

    def _id(self, nodeid: str) -> str:
        relative = getattr(self._config, "cwd_relative_nodeid", None)
        return str(relative(nodeid)) if relative is not None else nodeid

    def write(self, record: dict[str, Any]) -> None:
        """Number, sign and write a record."""
        record = dict(record, n=self._count)
        self._count += 1
        signature = self._sign()
        signature.update(signed_text(record))
        os.write(self._file, (json.dumps(dict(record, mac=signature.hexdigest())) + "\n").encode())


def functions() -> dict[Any, Any]:
    """Return the code of the functions and methods of the test runners that are loaded."""
    found: dict[Any, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in RUNNERS:
            continue
        for key, value in list(vars(module).items()):
            # Nothing is asked of what may answer in ways of its own, such as pytest.mark.
            if isinstance(value, types.FunctionType) and value.__module__ == name:
                found[name, key] = value.__code__
            elif isinstance(value, type) and value.__module__ == name:
                for attribute, member in list(vars(value).items()):
                    code = code_of(member)
                    if code is not None:
                        found[name, key, attribute] = code
    return found


def code_of(member: Any) -> Any:
    """Return the code behind a method or property; None when it is neither."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return member.__code__ if isinstance(member, types.FunctionType) else None


def signed_text(record: dict[str, Any]) -> bytes:
    """Return what of a record is signed: all but the signature, keys in order."""
    rest = {key: value for key, value in record.items() if key != "mac"}
    return json.dumps(rest, sort_keys=True).encode()


def status_of(report: Any) -> str | None:
    """Return the status that one phase of a test gives it; None when it changes nothing."""
    if report.when != "call":
        if report.failed:
            return "ERROR"
        if not report.skipped:
            return None
    expected_failure = hasattr(report, "wasxfail")
    if report.passed:
        return "XPASS" if expected_failure else "PASSED"
    if report.skipped:
        return "XFAIL" if expected_failure else "SKIPPED"
    return "FAILED" if report.failed else None


def main() -> int:
    """Run the tests with a reporter; return the runner's exit code."""
    order = json.loads(sys.stdin.readline())
    sys.path[1:1] = order.get("packages", [])
    reporter = Reporter(order["nonce"], order["path"])
    sources = order.get("sources", [])
    run = _unittest if order.get("runner") == "unittest" else _pytest
    order.clear()
    return run(reporter, sources)


def _pytest(reporter: Reporter, sources: list[str]) -> int:
    import _pytest.config
    import _pytest.main  # noqa: F401 - loaded before the repository can be
    import pytest

    _look_in(sources)
    return int(pytest.main(sys.argv[1:], plugins=[reporter]))


def _unittest(reporter: Reporter, sources: list[str]) -> int:
    import unittest
    import unittest.loader
    import unittest.runner

    reporter.watch()
    _look_in(sources)

    class Result(unittest.TextTestResult):
        """Remembers the worst that was said of each test."""

        def startTest(self, test: Any) -> None:
            """Begin with nothing said."""
            self.said = ""
            super().startTest(test)

        def stopTest(self, test: Any) -> None:
            """Write what became of it."""
            super().stopTest(test)
            reporter.write({"id": test.id(), "status": self.said or "ERROR"})

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            """Take a part of a test for the test."""
            super().addSubTest(test, subtest, err)
            if err is not None:
                self.said = "FAILED"

    def says(name: str, status: str) -> Any:
        def add(self: Any, test: Any, *rest: Any) -> None:
            getattr(super(Result, self), name)(test, *rest)
            if hasattr(self, "said") and (not self.said or status in ("FAILED", "ERROR")):
                self.said = status
            if not hasattr(test, "_testMethodName"):  # of a class or module as a whole
                reporter.write({"id": test.id(), "status": status})

        return add

    for name, status in (
        ("addSuccess", "PASSED"),
        ("addFailure", "FAILED"),
        ("addError", "ERROR"),
        ("addSkip", "SKIPPED"),
        ("addExpectedFailure", "XFAIL"),
        ("addUnexpectedSuccess", "XPASS"),
    ):
        setattr(Result, name, says(name, status))
    suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:])
    kind: Any = Result
    result = unittest.TextTestRunner(verbosity=2, resultclass=kind).run(suite)
    code = 0 if result.wasSuccessful() else 1
    reporter.end(code)
    return code


def _look_in(folders: list[str]) -> None:
    """Import from these folders from now on; the present one first, as ``python -m pytest`` has it.

    Isolated Pythons have no folder of the program's own at the beginning.
    """
    isolated = bool(sys.flags.isolated)
    sys.path[: 0 if isolated else 1] = [os.getcwd(), *folders]


def pytest_configure(config: Any) -> None:
    """Register a reporter when pytest loaded this file by ``-p``."""
    nonce = os.environ.pop("ROLLART_REPORT_NONCE", None)
    path = os.environ.pop("ROLLART_REPORT_PATH", None)
    if nonce and path:
        config.pluginmanager.register(Reporter(nonce, path), "rollart-report")


if __name__ == "__main__":
    sys.exit(main())
