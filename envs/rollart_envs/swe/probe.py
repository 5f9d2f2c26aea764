"""Run pytest and record details of each test: a single file for Python 3.8 or newer.

Takes: one JSON line on stdin, ``{"path": ..., "calls": true}``, and pytest's arguments. Gives: a
file of JSON lines at ``path``: each test's status, what it tried when it failed and the error, and
with ``calls`` the functions below the current folder that it called. The last line has pytest's
exit code. Never: proves anything. It is for trusted code only; grading uses ``report_plugin``.
"""

from __future__ import annotations

import ast
import builtins
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
        failures = ("FAILED", "ERROR")
        if status in failures or (status and self._record["status"] not in failures):
            self._record["status"] = status  # a failed subtest has a report before its test's
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
        with contextlib.suppress(SyntaxError, OSError, ValueError, AttributeError, RecursionError):
            self._record.setdefault("script", script_of(call.excinfo.tb, path))

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


SCRIPT_LINES = 24


def script_of(trace: Any, path: str) -> dict[str, Any]:
    """Return a script that does what a test did until it failed; empty if there is none.

    It has the statements of the test file that the failing one needs, with plain values for
    parameters and loop variables: ``setup``, and ``check``, which raises an error if the test
    fails. ``values`` are expressions that show what is wrong, and ``raises`` is the error that the
    first of them has to raise.
    """
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = found or trace
        trace = trace.tb_next
    if found is None or sys.version_info < (3, 9):
        return {}
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    frame = found.tb_frame
    before, failing = path_to(tree, found.tb_lineno)
    if failing is None:
        return {}
    owner = frame.f_locals.get("self")
    own = own_functions(tree, type(owner).__name__)
    fields = Fields(owner, own)
    before[:0] = own.values()
    check, shows, error = checked(fields.visit(failing))
    if not check:
        return {}
    needed = names_in(check)
    kept: list[Any] = []
    for node in reversed(before):
        if binds(node) & needed or changes(node, needed):
            kept.insert(0, fields.visit(node))
            needed |= names_in([node])
    bound = set().union(*map(binds, [*kept, *check]))
    values = {**frame.f_globals, **frame.f_locals}
    root = os.getcwd() + os.sep
    plain, imports = [], [ast.unparse(node) for node in kept if is_import(node)]
    for name in sorted(needed - bound - set(dir(builtins))):
        if name not in values:
            return {}
        is_value = is_plain(values[name])
        line = imported(name, values[name], frame.f_globals.get("__name__", ""))
        if not is_value and not line:
            return {}
        plain += [f"{name} = {values[name]!r}".replace(root, "")] if is_value else []
        imports += [] if is_value else [line]
    others = [ast.unparse(node) for node in kept if not is_import(node)]
    setup = "\n".join([*dict.fromkeys(imports), *plain, *others])
    text = "\n".join(map(ast.unparse, check))
    if (setup + text).count("\n") > SCRIPT_LINES or len(setup + text) > MESSAGE_CHARS:
        return {}
    return {"setup": setup, "check": text, "values": shows, "raises": error}


def own_functions(tree: Any, owner: str) -> dict[str, Any]:
    """Return the static methods of a test's class as functions, by name."""
    found = {}
    for node in (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner):
        for one in (n for n in node.body if isinstance(n, ast.FunctionDef)):
            if [d.id for d in one.decorator_list if isinstance(d, ast.Name)] == ["staticmethod"]:
                found[one.name] = one
                one.decorator_list = []
    return found


def path_to(tree: Any, line: int) -> tuple[list[Any], Any]:
    """Return the statements before the failing one, and that one; None: no script can repeat it."""
    before: list[Any] = []
    owner = tree
    body = tree.body
    while True:
        node = next((n for n in body if first_line(n) <= line <= (n.end_lineno or 0)), None)
        if not isinstance(owner, ast.ClassDef):
            others = [n for n in body if n is not node]
            before += [n for n in others if n.lineno < line or owner is tree]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.For, ast.If)):
            blocks = [node.body, getattr(node, "orelse", [])]
            inner = [b for b in blocks if b and first_line(b[0]) <= line <= (b[-1].end_lineno or 0)]
            if not inner:
                return before, None
            owner, body = node, inner[0]
            continue
        kinds = (ast.Assert, ast.Expr, ast.Assign, ast.Return, ast.With)
        return before, node if isinstance(node, kinds) else None


def first_line(node: Any) -> int:
    """Return the first line of a statement, with its decorators."""
    return int(min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]))


def imported(name: str, value: Any, test: str) -> str:
    """Return a statement that imports a value of a test file under a name; empty if none does."""
    if isinstance(value, type(sys)):
        return f"import {value.__name__} as {name}" if value.__name__ in sys.modules else ""
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    there = sys.modules.get(module) if isinstance(module, str) else None
    if module == test or not own.isidentifier() or getattr(there, own, None) is not value:
        return ""
    return f"from {module} import {own}" + ("" if own == name else f" as {name}")


def checked(node: Any) -> tuple[list[Any], list[str], str]:
    """Return statements that fail as a test's statement does, its expressions, and its error."""
    value: Any
    if isinstance(node, ast.Assert):
        return [ast.Assert(node.test, None)], values_of(node.test), ""
    if isinstance(node, ast.With):
        orders = [order for item in node.items for order in raises_of(item.context_expr)]
        if not orders:
            return [node], [], ""
        has_names = any(item.optional_vars is not None for item in node.items)
        is_plain_order = len(node.items) == 1 and not has_names
        return expecting(node.body, *orders[0]) if is_plain_order else ([], [], "")
    value = getattr(node, "value", None)
    name = getattr(getattr(value, "func", None), "attr", "")
    arguments = getattr(value, "args", [])
    if not name.startswith("assert"):
        is_call = value is not None and calls(value)
        return ([node], [ast.unparse(value)], "") if is_call else ([], [], "")
    if name in ("assertRaises", "assertRaisesRegex") and len(arguments) > 1:
        rest = arguments[1 if name == "assertRaises" else 2 :]
        call = ast.Call(rest[0], rest[1:], value.keywords)
        return expecting([ast.Expr(call)], *raises_of(value)[0])
    template = ASSERTIONS.get(name)
    if template is None or len(arguments) < template.count("%s"):
        return [], [], ""
    sides = [f"({ast.unparse(one)})" for one in arguments[: template.count("%s")]]
    test = ast.parse(template % tuple(sides), mode="eval").body
    return [ast.Assert(test, None)], values_of(test), ""


ASSERTIONS = {
    **dict.fromkeys(("assertEqual", "assertEquals", "assertListEqual"), "%s == %s"),
    **dict.fromkeys(("assertDictEqual", "assertTupleEqual", "assertSetEqual"), "%s == %s"),
    **dict.fromkeys(("assertSequenceEqual", "assertMultiLineEqual"), "%s == %s"),
    "assertNotEqual": "%s != %s",
    "assertTrue": "%s",
    "assertFalse": "not %s",
    "assertIs": "%s is %s",
    "assertIsNone": "%s is None",
    "assertIsNotNone": "%s is not None",
    "assertIn": "%s in %s",
    "assertNotIn": "%s not in %s",
    "assertIsInstance": "isinstance(%s, %s)",
    "assertLess": "%s < %s",
    "assertLessEqual": "%s <= %s",
    "assertGreater": "%s > %s",
    "assertGreaterEqual": "%s >= %s",
    "assertAlmostEqual": "round(%s - %s, 7) == 0",
}
"""unittest's methods as expressions."""


def raises_of(node: Any) -> list[tuple[Any, Any]]:
    """Return the error that ``raises(E)`` or ``assertRaises(E)`` expects, and its pattern or None.

    Both are expressions.
    """
    name = getattr(getattr(node, "func", None), "attr", "")
    name = name or getattr(getattr(node, "func", None), "id", "")
    if name not in ("raises", "assertRaises", "assertRaisesRegex") or not node.args:
        return []
    patterns = [one.value for one in node.keywords if one.arg == "match"]
    patterns += node.args[1:2] if name == "assertRaisesRegex" else []
    return [(node.args[0], patterns[0] if patterns else None)]


def expecting(body: list[Any], error: Any, pattern: Any) -> tuple[list[Any], list[str], str]:
    """Return statements that fail unless others raise an error, their expression, and the error."""
    failed = ast.parse("raise AssertionError('it raises nothing')").body
    told = f"`{ast.unparse(error)}`"
    first: list[Any] = []
    handled: list[Any] = [ast.Pass()]
    if pattern is not None:
        told += f" with a message that matches `{ast.unparse(pattern)}`"
        first = ast.parse("import re").body
        again = f"if not re.search({ast.unparse(pattern)}, str(error)):\n    raise"
        handled = ast.parse(again).body
    handler = ast.ExceptHandler(error, "error" if first else None, handled)
    values = [ast.unparse(node.value) for node in body if isinstance(node, (ast.Expr, ast.Assign))]
    check = [*first, ast.fix_missing_locations(ast.Try(body, [handler], failed, []))]
    return check, values if len(body) == 1 else [], told


def values_of(test: Any) -> list[str]:
    """Return the side of a comparison that calls something, and the whole test."""
    texts = [ast.unparse(test)]
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = [test.left, test.comparators[0]]
        called = [side for side in sides if calls(side)]
        names = [side for side in sides if not isinstance(side, ast.Constant)]
        texts.insert(0, ast.unparse((called or names or sides)[0]))
    return texts


def names_in(nodes: list[Any]) -> set[str]:
    """Return the names that statements read, without those of their own scopes."""
    found = [inner for node in nodes for inner in ast.walk(node)]
    inside = [inner for scope in found if isinstance(scope, SCOPES) for inner in ast.walk(scope)]
    names = [inner for inner in found if isinstance(inner, ast.Name)]
    read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    stored = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return read - stored - {inner.arg for inner in inside if isinstance(inner, ast.arg)}


SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def binds(node: Any) -> set[str]:
    """Return the names that a statement gives values."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Try):
        return {handler.name for handler in node.handlers if handler.name}
    if is_import(node):
        return {(a.asname or a.name).split(".")[0] for a in node.names}
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.With)):
        names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
        return {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return set()


def changes(node: Any, needed: set[str]) -> bool:
    """Return whether a statement is a call of, or writes into, an object that is needed."""
    target = node.value if isinstance(node, ast.Expr) else None
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        target = (node.targets if isinstance(node, ast.Assign) else [node.target])[0]
    if isinstance(target, ast.Call) and isinstance(target.func, ast.Name):
        inside = [n for one in target.args for n in ast.walk(one)]
        called = {id(n.func) for n in inside if isinstance(n, ast.Call)}
        read = {n.id for n in inside if isinstance(n, ast.Name) and id(n) not in called}
        return bool(read & needed)
    while isinstance(target, (ast.Call, ast.Attribute, ast.Subscript)):
        target = target.func if isinstance(target, ast.Call) else target.value
    return isinstance(target, ast.Name) and target.id in needed and target.id != "self"


def is_import(node: Any) -> bool:
    """Return whether a statement is an absolute import."""
    return isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)


class Fields(ast.NodeTransformer):
    """Replaces plain fields of a test's ``self`` by their values, and static methods by names."""

    def __init__(self, owner: Any, functions: Any) -> None:
        self._owner = owner
        self._functions = functions

    def visit_Attribute(self, node: Any) -> Any:
        """Return a field's value if it is plain."""
        self.generic_visit(node)
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        is_own = of in ("self", type(self._owner).__name__)
        if is_own and node.attr in self._functions:
            return ast.Name(node.attr, node.ctx)
        if not is_own or not isinstance(node.ctx, ast.Load) or self._owner is None:
            return node
        owner = self._owner if of == "self" else type(self._owner)
        value = vars(owner).get(node.attr, getattr(type(self._owner), node.attr, self))
        return ast.parse(repr(value), mode="eval").body if is_plain(value) else node


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
        if name == "assertEqual" and any(map(calls, value.args[:2])):
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
