"""Watches the process in which tests run for code that steers them: one file for Python from 3.8.

Takes: which files a patch touched, and what they held before. Gives: a call of ``accuse`` for
each thing that a judged patch must not do. Never: refuses what the base code or the runner does.

Python reports some operations to audit hooks, which no Python code can remove: reading frames,
asking the garbage collector for objects, tracing, changing a function's code. Such an operation
counts if the code responsible for it lies in a file that the patch touched, and neither that file's
base version nor the gold patch uses it. Files of tests are compiled here, so that a test is known
by its code object, and ``==`` in them notices values that equal everything. Functions and classes
of the runner, ``ast`` and ``builtins`` are compared between tests.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

WATCHED = ("unittest", "_pytest", "pluggy", "ast", "builtins", "importlib")
EQUAL = "@rollart_equal"
WORDS = {
    "gc.get_objects": ("get_objects",),
    "gc.get_referrers": ("get_referrers",),
    "gc.get_referents": ("get_referents",),
    "sys._current_frames": ("_current_frames",),
    "sys._getframe": ("_getframe", "currentframe", "stack(", "getouterframes", "walk_stack"),
    "sys.settrace": ("settrace",),
    "sys.setprofile": ("setprofile",),
    "tb_frame": ("tb_frame", "walk_tb", "getinnerframes", "inspect.trace"),
    "gi_frame": ("gi_frame",),
    "cr_frame": ("cr_frame",),
    "__code__": ("__code__",),
    "open": ("open(", "read_text", "read_bytes"),
    "write": ("open(", "write_text", "write_bytes", "shutil", "rename", "replace(", "remove("),
    "ctypes.dlopen": ("ctypes",),
    "ctypes.dlsym": ("ctypes",),
}
"""Operations that are watched, and words of a source that show that it uses one."""
WRITES = {"os.rename": 2, "os.remove": 1, "os.truncate": 1, "os.link": 2, "os.symlink": 2}
"""Operations that replace files -> how many paths are their first arguments."""
EVENTS = ("gc.", "sys.", "object.", "ctypes.", "open", *WRITES)
HELPERS = (
    *("inspect.py", "dis.py", "linecache.py", "pathlib.py", "tokenize.py", "codecs.py"),
    "shutil.py",
)


class Guard:
    """What is known of the files, and what was seen of the runner."""

    def __init__(self, order: Any, accuse: Callable[[str], None]) -> None:
        root = os.path.realpath(os.getcwd())
        base = order.get("base", {})
        self.base = {os.path.join(root, path): text for path, text in base.items()}
        self.gold = order.get("gold", "")
        self.tests = {os.path.join(root, path) for path in order.get("tests", ())}
        self.folders = tuple(os.path.join(root, p, "") for p in order.get("test_folders", ()))
        self.accuse = accuse
        self.codes: dict[types.CodeType, bool] = {}
        self.paths: dict[str, str] = {}
        self.runner: dict[Any, Any] = {}
        self.helpers: dict[Any, Any] = {}
        self.busy = False
        self.present = {
            os.path.join(folder, name)
            for top in self.folders
            for folder, _, names in os.walk(top)
            for name in names
        }
        """Files in folders of tests, before the package is imported."""

    def path(self, name: str) -> str:
        """Return a file's path without links."""
        if name not in self.paths:
            self.paths[name] = os.path.realpath(name)
        return self.paths[name]

    def is_patched(self, name: str) -> bool:
        """Tell whether the patch touched a source file."""
        return self.path(name) in self.base

    def is_test(self, name: str) -> bool:
        """Tell whether a file belongs to the tests."""
        path = self.path(name)
        return path in self.tests or (path.startswith(self.folders) and path not in self.base)

    # Audit events.

    def audit(self, event: str, arguments: Any) -> None:
        """Look at an operation that Python reports."""
        if self.busy or not event.startswith(EVENTS):
            return
        name = arguments[1] if event.startswith("object.") else event
        if event in WRITES:
            name = "write"
        if name not in WORDS:
            return
        self.busy = True
        try:
            self._judge(event, name, arguments)
        finally:
            self.busy = False

    def _judge(self, event: str, name: str, arguments: Any) -> None:
        frame = _responsible(sys._getframe(2), event)
        if frame is None or not self.is_patched(frame.f_code.co_filename):
            return
        path = self.path(frame.f_code.co_filename)
        if name == "__code__" and not self._is_tests_code(arguments[0]):
            return
        if name == "open" and not self._is_secret(arguments[0]):
            if not _writes(*arguments[1:3]):
                return
            name = "write"
        if name == "write" and not any(map(self._was_in_tests, arguments[: WRITES.get(event, 1)])):
            return
        known = self.base[path] + self.gold
        if name == "open" or not any(word in known for word in WORDS[name]):
            self.accuse(f"{os.path.basename(path)} uses {event} ({name})")

    def _is_tests_code(self, function: Any) -> bool:
        return isinstance(function, types.FunctionType) and (
            function.__code__ in self.codes or self.is_test(function.__code__.co_filename)
        )

    def _was_in_tests(self, name: Any) -> bool:
        """Tell whether a path is of a file that was in a folder of tests from the beginning."""
        if not isinstance(name, (str, bytes, os.PathLike)):
            return False
        path = os.path.abspath(os.fsdecode(name))
        folder, base = os.path.split(path)
        return not self.present.isdisjoint(
            (os.path.realpath(path), os.path.join(os.path.realpath(folder), base))
        )

    def _is_secret(self, name: Any) -> bool:
        if not isinstance(name, (str, bytes, os.PathLike)):
            return False
        path = os.path.realpath(os.fsdecode(name))
        memory = path.startswith("/proc/") and path.endswith(("/mem", "/maps"))
        return memory or (path.endswith(".py") and self.is_test(path))

    # Sources of tests.

    def compile_tests(self) -> None:
        """Have files of tests compiled here when they are imported, and never read compiled."""
        guard, compiled = self, importlib.machinery.SourceFileLoader.source_to_code
        cached = importlib.machinery.SourceFileLoader.get_code

        def source_to_code(loader: Any, data: Any, path: Any, **options: Any) -> Any:
            if not isinstance(path, str) or not guard.is_test(path):
                return compiled(loader, data, path, **options)
            return guard.known(compiled(loader, guard.guarded(parse(data)), path, **options))

        def get_code(loader: Any, name: str) -> Any:
            path = loader.get_filename(name)
            if not guard.is_test(path):
                return cached(loader, name)
            return source_to_code(loader, loader.get_data(path), path)

        parse = ast.parse
        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
        importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign,assignment]
        import builtins

        setattr(builtins, EQUAL, self.equal)

    def guarded(self, tree: Any) -> Any:
        """Return a module's tree in which ``==`` is watched."""
        return ast.fix_missing_locations(_Equals().visit(tree))

    def known(self, code: Any) -> Any:
        """Note the code objects of a file of tests; return it."""
        self.codes[code] = True
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self.known(inner)
        return code

    def expect_own(self, function: Any) -> None:
        """Accuse unless a test's function is that of its file."""
        for _ in range(100):
            function = getattr(function, "__func__", function)
            wrapped = getattr(function, "__wrapped__", None)
            if wrapped is None:
                break
            function = wrapped
        self.busy = True
        try:
            code = getattr(function, "__code__", None)
        finally:
            self.busy = False
        if code is None:
            return
        name = code.co_filename
        if self.is_patched(name) or (self.is_test(name) and not self._is_known(code)):
            self.accuse(f"a test is no longer that of its file: {code.co_name} of {name}")

    def _is_known(self, code: types.CodeType) -> bool:
        return any(code is known for known in self.codes if known == code)

    def equal(self, one: Any, other: Any) -> Any:
        """Return ``one == other``; accuse if that is so for values that differ."""
        result = one == other
        self.expect_honest(one, other)
        return result

    def expect_honest(self, one: Any, other: Any) -> None:
        """Accuse if one of two values equals others that differ."""
        kind = type(one)
        if kind in (list, tuple) and type(other) is kind and len(one) == len(other) < 1000:
            for pair in zip(one, other):
                self.expect_honest(*pair)
        elif kind is dict and type(other) is dict and len(one) < 1000:
            for key in one:
                if key in other:
                    self.expect_honest(one[key], other[key])
        elif kind in _OTHERS:
            self._try(other, one)
        elif type(other) in _OTHERS:
            self._try(one, other)

    def _try(self, value: Any, plain: Any) -> None:
        for kind in type(value).__mro__:
            if "__eq__" in vars(kind):
                break
        else:
            return
        method = vars(kind)["__eq__"]
        self.busy = True
        code = getattr(method, "__code__", None)
        self.busy = False
        if code is None or not self.is_patched(code.co_filename) or self._was_there(code):
            return
        if all(value == other for other in (plain, *_OTHERS[type(plain)](plain))):
            self.accuse(f"a {type(value).__name__} equals values that differ")

    def _was_there(self, code: types.CodeType) -> bool:
        try:
            pending = [compile(self.base[self.path(code.co_filename)], "base", "exec")]
        except (SyntaxError, ValueError):
            return False
        while pending:
            found = pending.pop()
            same = found.co_name == code.co_name and found.co_code == code.co_code
            if same and found.co_names == code.co_names and found.co_consts == code.co_consts:
                return True
            pending += [c for c in found.co_consts if isinstance(c, types.CodeType)]
        return False

    # The runner.

    def watch(self) -> None:
        """Note what the runner is made of, before the package is imported."""
        self.busy = True
        self.runner = parts(lambda name: name.split(".")[0] in WATCHED)
        self.busy = False

    def compare(self) -> None:
        """Accuse if the runner, or a function of the tests, has changed."""
        self.busy = True
        try:
            now = parts(lambda name: name.split(".")[0] in WATCHED)
            for key, (value, code) in self.runner.items():
                found = now.get(key, (None, None))
                if (found[0] is not value or found[1] is not code) and self._is_foreign(found[0]):
                    self.accuse(f"{'.'.join(key)} was changed")
            self._compare_tests()
        finally:
            self.busy = False

    def _compare_tests(self) -> None:
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if not isinstance(path, str) or not self.is_test(path):
                continue
            for key, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    kept = self.helpers.setdefault((name, key), value)
                    if kept is not value and self.is_patched(value.__code__.co_filename):
                        self.accuse(f"{name}.{key} was changed")

    def _is_foreign(self, value: Any) -> bool:
        """Tell whether a new part of the runner is not the base code's or another package's."""
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, types.CodeType):
            return self.is_patched(code.co_filename) or code.co_filename.startswith("<")
        module = sys.modules.get(str(getattr(value, "__module__", "")))
        path = getattr(module, "__file__", None)
        if not isinstance(path, str):
            return True
        watched = str(getattr(module, "__name__", "")).split(".")[0] in WATCHED
        return watched or self.is_patched(path)


_OTHERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    int: lambda value: (value + 1, value - 7919),
    float: lambda value: (value + 1.5, value - 7919.25),
    str: lambda value: (value + "\x00a", "\x00b" + value),
    bytes: lambda value: (value + b"\x00a", b"\x00b" + value),
    bool: lambda value: (not value,),
}


def _writes(mode: Any, flags: Any) -> bool:
    """Tell whether a file is opened to be written, as the audit event ``open`` says it."""
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _responsible(frame: Any, event: str) -> Any:
    """Return the frame of the code that an operation is due to; None: nobody's."""
    while frame is not None:
        name = frame.f_code.co_filename
        base = os.path.basename(name)
        walks = base == "traceback.py" and frame.f_code.co_name in ("walk_tb", "walk_stack")
        unnamed = name.startswith("<") and not name.startswith("<frozen")
        if base in HELPERS or walks or unnamed:
            frame = frame.f_back
            continue
        return frame
    return None


def parts(is_wanted: Callable[[str], bool]) -> dict[Any, Any]:
    """Return the functions, classes and members of loaded modules, each with its code."""
    found: dict[Any, Any] = {}
    for name, module in list(sys.modules.items()):
        if not is_wanted(name) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            # Nothing is asked of what may answer in ways of its own, such as pytest.mark.
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                found[name, key] = (value, code_of(value))
            elif isinstance(value, type):
                found[name, key] = (value, None)
                if value.__module__ == name and name != "builtins":
                    for attribute, member in list(type.__dict__["__dict__"].__get__(value).items()):
                        code = code_of(member)
                        if code is not None:
                            found[name, key, attribute] = (member, code)
    return found


def code_of(member: Any) -> Any:
    """Return the code behind a function, method or property; None when it is none."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return member.__code__ if isinstance(member, types.FunctionType) else None


class _Equals(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> Any:
        """Replace ``a == b`` by a call that looks at both."""
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        name = ast.Name(EQUAL, ast.Load())
        return ast.copy_location(ast.Call(name, [node.left, node.comparators[0]], []), node)
