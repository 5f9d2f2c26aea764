"""Run pytest and record details of each test: a single file for Python 3.8 or newer.

Takes: one JSON line on stdin, ``{"path": ..., "calls": true}``, and pytest's arguments. Gives: a
file of JSON lines at ``path``: each test's status, what it tried when it failed and the error, and
with ``calls`` the functions below the current folder that it called. The last line has pytest's
exit code. Never: proves anything. It is for trusted code only; grading uses ``report_plugin``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

MESSAGE_CHARS = 2000
DOC_CHARS = 600
VALUE_CHARS = 80
TRIED = 3


class Probe:
    """Observes pytest's tests and writes a line for each."""

    def __init__(self, path: str, calls: bool) -> None:
        self._file = open(path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._calls = calls
        self._root = os.getcwd() + os.sep
        self._config: Any = None
        self._seen: dict[int, Any] = {}
        self._record: dict[str, Any] = {}

    def pytest_configure(self, config: Any) -> None:
        """Store the config, which has pytest's format of ids."""
        self._config = config

    def pytest_collectreport(self, report: Any) -> None:
        """Write that a file could not be collected."""
        if report.failed:
            message = last_error(str(report.longrepr))
            self._write({"collect": self._id(report.nodeid), "message": message})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin a test."""
        self._record = {"id": self._id(nodeid), "status": ""}
        self._seen = {}
        if self._calls:
            sys.setprofile(self._called)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the result of a test."""
        if self._calls:
            sys.setprofile(None)
            codes = [c for c in self._seen.values() if c.co_filename.startswith(self._root)]
            self._record["calls"] = sorted(
                {(c.co_filename[len(self._root) :], c.co_firstlineno) for c in codes}
            )
        self._write(self._record)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the report of a test's setup, call or teardown."""
        status = status_of(report)
        if status is not None:
            self._record["status"] = status
        if report.failed and "message" not in self._record:
            self._record["message"] = crash_of(report)[:MESSAGE_CHARS]

    def pytest_runtest_setup(self, item: Any) -> None:
        """Store the docstring of a test."""
        doc = getattr(getattr(item, "obj", None), "__doc__", None)
        if isinstance(doc, str):
            self._record["doc"] = doc[:DOC_CHARS]

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """Store what a test tried when it failed."""
        path = str(getattr(node, "path", None) or getattr(node, "fspath", ""))
        with contextlib.suppress(SyntaxError, OSError, ValueError, AttributeError, RecursionError):
            self._record.setdefault("tried", tried(call.excinfo.tb, path))

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """Write the end."""
        self._write({"end": int(exitstatus)})
        self._file.flush()

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self._seen[id(frame.f_code)] = frame.f_code

    def _id(self, nodeid: str) -> str:
        relative = getattr(self._config, "cwd_relative_nodeid", None)
        return str(relative(nodeid)) if relative is not None else nodeid

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def tried(trace: Any, path: str) -> list[str]:
    """Return what a test expected where it failed, with plain values filled in."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = trace
        trace = trace.tb_next
    if found is None or sys.version_info < (3, 9):
        return []
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and covers(n, found.tb_lineno)]
    if not around:
        return []
    statement = min(around, key=lambda n: (n.end_lineno or 0) - n.lineno)
    return short(expected(Filler(found.tb_frame.f_locals).visit(statement)))


def short(texts: Any) -> list[str]:
    """Return the first few texts that are short enough to read."""
    return [text for text in dict.fromkeys(texts) if len(text) <= 3 * VALUE_CHARS][:TRIED]


def covers(node: Any, line: int) -> bool:
    """Return whether a statement covers a line and is not a definition."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.If, ast.Try)
    return not isinstance(node, kinds) and node.lineno <= line <= node.end_lineno


def expected(node: Any) -> Iterator[str]:
    """Yield what a statement of a test expects: comparisons, calls, errors."""
    if isinstance(node, ast.Assert):
        if calls(node.test):
            yield ast.unparse(node.test)
    elif isinstance(node, ast.With):
        error = next((name for item in node.items for name in raised(item.context_expr)), "")
        for text in (text for inner in node.body for text in expected(inner)):
            yield text + (f"  # raises {error}" if error else "")
    elif isinstance(node, (ast.Expr, ast.Assign, ast.Return)) and node.value is not None:
        value: Any = node.value
        name = getattr(getattr(value, "func", None), "attr", "")
        if name == "assertEqual" and len(value.args) > 1 and calls(value):
            yield " == ".join(map(ast.unparse, value.args[:2]))
        elif name.startswith("assert"):
            yield from (ast.unparse(side) for side in value.args if calls(side))
        elif calls(value):
            yield ast.unparse(value)


def raised(node: Any) -> Iterator[str]:
    """Yield the error that ``raises(...)`` expects."""
    name = getattr(getattr(node, "func", None), "attr", "")
    if name in ("raises", "assertRaises", "assertRaisesRegex") and node.args:
        yield ast.unparse(node.args[0])


def calls(node: Any) -> bool:
    """Return whether an expression calls anything."""
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


class Filler(ast.NodeTransformer):
    """Replaces local names by their plain values."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def visit_Name(self, node: Any) -> Any:
        """Return a name's value if it is plain and short."""
        value = self._values.get(node.id)
        is_read = isinstance(node.ctx, ast.Load) and node.id in self._values
        if not is_read or not is_plain(value):
            return node
        text = repr(value)
        return ast.parse(text, mode="eval").body if len(text) <= VALUE_CHARS else node

    def _left(self, node: Any) -> Any:
        """Do not change nodes with names of their own."""
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_Lambda = _left


def is_plain(value: Any) -> bool:
    """Return whether a value equals its repr."""
    if type(value) in (list, tuple):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes)


def crash_of(report: Any) -> str:
    """Return the error's class and message, with pytest's explanation of an assertion."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message) if crash is not None else last_error(str(report.longrepr))


def last_error(text: str) -> str:
    """Return the last line of pytest's explanation of an error (``E   ...``)."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    plain = text.strip().splitlines() or [""]
    return (lines or plain)[-1][:MESSAGE_CHARS]


def status_of(report: Any) -> str | None:
    """Return the status from one phase of a test; None if the phase does not change it."""
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
    """Run pytest with a probe; return its exit code."""
    order = json.loads(sys.stdin.readline())
    import pytest

    sys.path[:1] = [os.getcwd()]
    return int(pytest.main(sys.argv[1:], plugins=[Probe(order["path"], order["calls"])]))


if __name__ == "__main__":
    sys.exit(main())
