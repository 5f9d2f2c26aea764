"""Watch the process in which tests run for code that manipulates them: one file, Python 3.8+.

Takes: the files that a patch changed, and their base versions. Gives: a call of ``accuse`` for
each forbidden operation of the judged patch. Never: rejects what the base code or the runner does.

Python reports some operations to audit hooks, which Python code cannot remove: reading frames,
asking the garbage collector for objects, tracing, changing a function's code, reading the tests'
sources, starting a process. Such an operation counts if code of the patch is responsible for it,
and neither the base version of its file nor the gold patch uses it. Code of the patch is in a file
that the patch changed, or was executed by such code, whatever file name it has. Calling through a
library does not change this, except for a few libraries that do the operation on their own.

Test files are compiled here, so that a test is identified by its code object, and ``==`` in them
detects values that equal everything. Functions and classes of the runner, ``ast`` and ``builtins``
are compared after each test.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.machinery
import inspect
import os
import re
import sys
import threading
import time
import types
import warnings  # noqa: F401  # must be loaded before its lines are hidden
from collections.abc import Callable
from operator import is_, itemgetter
from typing import Any

_INSPECT = inspect.__file__
WATCHED = ("unittest", "_pytest", "pluggy", "ast", "builtins", "importlib")
EQUAL, ASSERTION = "@rollart equal", "@rollart assertion"
"""Placeholders in a test's code for functions of the guard, which replace them."""
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
    "change": ("shutil", "rename", "replace(", "remove(", "unlink", "truncate", "link("),
    "folder": ("dir_fd", "fwalk", "os.open("),
    "ctypes.dlopen": ("ctypes",),
    "ctypes.dlsym": ("ctypes",),
    "process": ("subprocess", "popen", "Popen", "os.system", "spawn", "fork", "multiprocessing"),
}
"""Watched operations, and words in a source that show that it uses one."""
WRITES = {"os.rename": 2, "os.remove": 1, "os.truncate": 1, "os.link": 2, "os.symlink": 2}
"""Operations that replace files -> the number of leading arguments that are paths."""
PROCESSES = (
    *("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"),
    "os.spawn",
)
"""Audit events of starting a process."""
MADE = "made"
"""The operation whose first argument is code that can choose its own file name."""
OPERATIONS = {
    **{name: name for name in WORDS if "." in name or name == "open"},
    **dict.fromkeys(WRITES, "change"),
    **dict.fromkeys(PROCESSES, "process"),
    **dict.fromkeys(("exec", "function.__new__"), MADE),
    **dict.fromkeys(("object.__getattr__", "object.__setattr__", "object.__delattr__"), ""),
}
"""Audit events -> watched operations; empty: the attribute is the operation."""
HELPERS = (
    *("inspect.py", "dis.py", "linecache.py", "pathlib.py", "tokenize.py", "codecs.py"),
    *("shutil.py", "pkgutil.py"),
)
"""Files of Python that act on behalf of their caller."""
STARTERS = ("subprocess.py", "os.py", "pty.py", "process.py", "context.py", "pool.py")
STARTERS_IN = ("multiprocessing", "asyncio", "concurrent")
"""Files and folders of Python that start processes on behalf of their caller."""


class _Thread(threading.local):
    """The state of a thread."""

    busy = False


class Guard:
    """The state of the files, and the observed state of the runner."""

    def __init__(self, order: Any, accuse: Callable[[str], None]) -> None:
        self.root = root = os.path.realpath(os.getcwd())
        base = order.get("base", {})
        self.base = {os.path.join(root, path): text for path, text in base.items()}
        self.gold = order.get("gold", "")
        self.calls = frozenset(order.get("calls", ()))
        self.own = {os.path.join(root, path) for path in order.get("own", ())}
        self.tests = {os.path.join(root, path) for path in order.get("tests", ())}
        self.folders = tuple(os.path.join(root, p, "") for p in order.get("test_folders", ()))
        self.accuse = accuse
        self.is_runner = bool(order.get("is_runner"))
        """Whether the base commit contains pytest, or a package that it needs."""
        self.is_trusting = False
        self.codes: dict[int, types.CodeType] = {}
        self.paths: dict[str, str] = {}
        self.wrappers: dict[int, list[types.CodeType]] = {}
        self.helping = {
            EQUAL: equal_of(self.expect_honest),
            ASSERTION: assertion_of(self.expect_assertion),
        }
        self.runner: dict[Any, Any] = {}
        self.seen: Seen | None = None
        self.hooks: Functions | None = None
        self.helpers: dict[Any, Any] = {}
        self.others: set[str] = set()
        """Paths of loaded files that are not tests."""
        self.made: dict[int, tuple[types.CodeType, str]] = {}
        self.began = time.time()
        self._here = _Thread()
        self.present = {
            os.path.join(folder, name)
            for top in self.folders
            for folder, _, names in os.walk(top)
            for name in names
        }
        """Files in test folders, before the package is imported."""

    @property
    def busy(self) -> bool:
        """Whether this thread runs the guard's own code."""
        return self._here.busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        self._here.busy = busy

    def trust(self) -> None:
        """Accuse no more, and allow all operations: the patch changes the runner itself."""
        self.accuse = lambda why: None
        self.gold = " ".join(word for words in WORDS.values() for word in words)
        self.is_trusting = True

    def path(self, name: str) -> str:
        """Return a file's path with links resolved."""
        if name not in self.paths:
            self.paths[name] = os.path.realpath(name)
        return self.paths[name]

    def is_patched(self, name: str) -> bool:
        """Return whether the patch changed a source file."""
        return self.path(name) in self.base

    def is_test(self, name: str) -> bool:
        """Return whether a file belongs to the tests."""
        path = self.path(name)
        return path in self.tests or (path.startswith(self.folders) and path not in self.base)

    def origin(self, code: Any) -> str | None:
        """Return the file of the patch that a code object comes from; None: not from the patch.

        Empty if the code has no file, so that it can only come from the patch.
        """
        made = self.made.get(id(code))
        if made is not None:
            return made[1]
        path = self.path(code.co_filename)
        return path if path in self.base else None

    # Audit events.

    def audit(self, event: str, arguments: Any) -> None:
        """Check an operation that Python reports."""
        name = OPERATIONS.get(event)
        if name is None or self._here.busy:
            return
        if name == MADE:
            if isinstance(arguments[0], types.CodeType):
                self.busy = True
                try:
                    self._take(arguments[0], sys._getframe(1))
                finally:
                    self.busy = False
            return
        name = name or arguments[1]
        if name not in WORDS:
            return
        self.busy = True
        try:
            self._judge(event, name, arguments)
        finally:
            self.busy = False

    def _judge(self, event: str, name: str, arguments: Any) -> None:
        if name == "__code__":
            if len(arguments) > 2 and isinstance(arguments[2], types.CodeType):
                self._take(arguments[2], sys._getframe(2))
            if not self._is_tests_code(arguments[0]) or self._reads_signature(event):
                return
        if name == "open":
            name = self._opening(*arguments[:3])
        changed = arguments[: WRITES.get(event, 1)]
        if not name or (name in ("write", "change") and not any(map(self._was_in_tests, changed))):
            return
        path, code = self._responsible(sys._getframe(2), name)
        if path is None:
            return
        known = self.gold if name == "open" else self.base.get(path, "") + self.gold
        unchanged = name == "open" and code is not None and self._was_there(code)
        if not unchanged and not any(word in known for word in WORDS[name]):
            self.accuse(f"{os.path.basename(path) or 'code of no file'} uses {event} ({name})")

    def _reads_signature(self, event: str) -> bool:
        """Return whether ``inspect`` reads the code of a function for its signature.

        The signature contains nothing else of the code.
        """
        code = sys._getframe(3).f_code
        is_inspect = code.co_filename == _INSPECT and self.origin(code) is None
        return (
            is_inspect and event == "object.__getattr__" and code.co_name.startswith("_signature_")
        )

    def _opening(self, name: Any, mode: Any, flags: Any) -> str:
        """Return the operation that opening a file is; empty if it is not watched.

        Opening folders is watched because Python does not report the folder of a relative path.
        """
        if self._is_secret(name):
            return "open"
        if _writes(mode, flags):
            return "write"
        is_path = isinstance(name, (str, bytes, os.PathLike))
        return "folder" if mode is None and is_path and os.path.isdir(name) else ""

    def _responsible(self, frame: Any, name: str) -> tuple[str | None, Any]:
        """Return the file of the patch that is responsible for an operation, and its code.

        None: the patch is not responsible.

        The innermost frame of the repository decides. Libraries below it act on its behalf, unless
        they are known to do the operation on their own. A library that reads files on its own is
        allowed if the base version or the gold patch calls the same function.
        """
        word, own, reads, called = name.rpartition(".")[2], False, False, None
        while frame is not None:
            code = frame.f_code
            path = self.origin(code)
            if path is not None:
                return (None, None) if reads and self._has_call(path, called) else (path, code)
            name_of = code.co_filename
            if name_of[:1] != "<" and self.path(name_of).startswith(self.root + os.sep):
                return None, None
            if _is_innocent(frame, name):
                return None, None
            own = own or (name != "open" and word in code.co_names)
            reads = reads or (name == "open" and _reads(code))
            called, frame = frame, frame.f_back
        nobody = not own and threading.current_thread() is not threading.main_thread()
        return ("" if nobody else None), None

    def _has_call(self, path: str, called: Any) -> bool:
        """Return whether the base version of a file, or gold, names the called function."""
        name = name_of(called)
        return name in self.calls or name in re.findall(r"\w+", self.base.get(path, ""))

    def _take(self, code: types.CodeType, frame: Any) -> None:
        """Record code that the patch executes, unless it is from a file that existed before."""
        if self._is_known(code):
            return
        caller, path = frame.f_code, self.origin(frame.f_code)
        if path is None and _loads(caller) and self._was_loaded(code, frame):
            return
        while path is None and frame is not None:
            if self.is_test(frame.f_code.co_filename):
                return
            path, frame = self.origin(frame.f_code), frame.f_back
        if path is None and not {"exec", "eval", "FunctionType"}.isdisjoint(caller.co_names):
            return  # no code of the repository asked for it: the runner, or a library
        pending = [code]
        while pending:
            found = pending.pop()
            self.made[id(found)] = (found, path or "")
            pending += [c for c in found.co_consts if isinstance(c, types.CodeType)]

    def _was_loaded(self, code: types.CodeType, frame: Any) -> bool:
        """Return whether a loader executes a module whose files are unchanged."""
        scope = (frame.f_locals.get("args") or (None,))[-1]
        spec = scope.get("__spec__") if isinstance(scope, dict) else None
        compiled = getattr(spec, "cached", None)
        files = [code.co_filename, getattr(spec, "origin", None)]
        if isinstance(compiled, str) and os.path.exists(compiled):
            files.append(compiled)
        return all(self._is_old(f) for f in files if isinstance(f, str) and not f.startswith("<"))

    def _is_old(self, name: str) -> bool:
        """Return whether a file is unchanged since the run began."""
        try:
            if os.stat(name).st_ctime <= self.began:
                return True
            return bool(os.statvfs(name).f_flag & os.ST_RDONLY)  # links to it are made outside
        except (OSError, ValueError):
            return False

    def _is_tests_code(self, function: Any) -> bool:
        return isinstance(function, types.FunctionType) and (
            self._is_known(function.__code__) or self.is_test(function.__code__.co_filename)
        )

    def _was_in_tests(self, name: Any) -> bool:
        """Return whether a path is, or contains, a file that the tests had at the start."""
        if not isinstance(name, (str, bytes, os.PathLike)):
            return False
        path = os.path.abspath(os.fsdecode(name))
        folder, base = os.path.split(path)
        paths = (os.path.realpath(path), os.path.join(os.path.realpath(folder), base))
        above = tuple(os.path.join(path, "") for path in paths)
        return not self.present.isdisjoint(paths) or any(
            path.startswith(above) for path in (*self.tests, *self.present)
        )

    def _is_secret(self, name: Any) -> bool:
        if not isinstance(name, (str, bytes, os.PathLike)):
            return False
        path = os.path.realpath(os.fsdecode(name))
        memory = path.startswith("/proc/") and path.endswith(("/mem", "/maps"))
        return memory or (path.endswith(".py") and self.is_test(path))

    def report_processes(self) -> None:
        """Report processes that start without an audit event, such as multiprocessing's."""
        try:
            import _posixsubprocess
        except ImportError:
            return
        started = _posixsubprocess.fork_exec

        def fork_exec(*arguments: Any) -> Any:
            sys.audit("os.spawn", *arguments[:2])
            return started(*arguments)

        _posixsubprocess.fork_exec = fork_exec

    def hide_lines(self) -> None:
        """Remove lines of tests from warnings, because stderr can be read."""
        for name in ("warnings", "_py_warnings"):
            module = sys.modules.get(name)
            if hasattr(module, "_formatwarnmsg_impl"):
                module._formatwarnmsg_impl = self._without_line(module._formatwarnmsg_impl)  # type: ignore[union-attr]

    def _without_line(self, shown: Callable[[Any], str]) -> Callable[[Any], str]:
        is_test = self.is_test

        def formatted(message: Any) -> str:
            if message.line is None and is_test(str(message.filename)):
                message.line = ""
            return shown(message)

        return formatted

    # Sources of tests.

    def compile_tests(self) -> None:
        """Compile test files here on import, and never load their compiled files."""
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

    def guarded(self, tree: Any) -> Any:
        """Return a module's tree in which ``==`` and assertions are watched."""
        return ast.fix_missing_locations(_Watched().visit(tree))

    def known(self, code: types.CodeType | None) -> types.CodeType | None:
        """Return the code of a test file with the guard's functions; record it and its parts.

        None stays None: pytest before 5 could not rewrite the file, and imports it as it is.
        """
        if code is None:
            return None
        consts: Any = [
            self.known(c) if isinstance(c, types.CodeType) else c for c in code.co_consts
        ]
        consts = [self.helping.get(c, c) if isinstance(c, str) else c for c in consts]
        code = code.replace(co_consts=tuple(consts))
        self.codes[id(code)] = code
        return code

    def expect_own(self, function: Any) -> None:
        """Accuse unless a test's function is from its file and has its original wrappers."""
        codes = []
        for _ in range(100):
            function = unbound(function)
            code = self._code_of(function)
            wrapped = getattr(function, "__wrapped__", None)
            if wrapped is None:
                break
            codes.append(code)
            function = wrapped
        if code is None:
            if self._is_no_tests(function):
                self.accuse(f"a test is no longer that of its file: {function!r:.80}")
            return
        name = code.co_filename
        if self.origin(code) is not None or (self.is_test(name) and not self._is_known(code)):
            self.accuse(f"a test is no longer that of its file: {code.co_name} of {name}")
        wrappers = [c for c in codes if c is not None and self.origin(c) is not None]
        kept = self.wrappers.setdefault(id(code), wrappers)
        if any(all(c is not old for old in kept) for c in wrappers):
            self.accuse(f"a test was wrapped by the patch: {code.co_name} of {name}")

    def _code_of(self, function: Any) -> types.CodeType | None:
        self.busy = True
        try:
            code = getattr(function, "__code__", None)
        finally:
            self.busy = False
        return code if isinstance(code, types.CodeType) else None

    def expect_run(self, run: Any, test: str) -> None:
        """Accuse if the code that runs a test instead of pytest is the patch's, or a builtin."""
        if run is not None and self._is_no_tests(run):
            self.accuse(f"a test is not run by pytest: {test}")

    def _is_no_tests(self, function: Any) -> bool:
        return isinstance(function, (type, types.BuiltinFunctionType)) or self.is_made(function)

    def is_made(self, value: Any) -> bool:
        """Return whether a function, or an object's ``__call__``, is code of the patch."""
        value = unbound(value)
        if not isinstance(value, types.FunctionType):
            kinds = (vars(kind) for kind in type(value).__mro__)
            value = next((kind["__call__"] for kind in kinds if "__call__" in kind), None)
        code = self._code_of(value)
        return code is not None and self.origin(code) is not None

    def expect_hooks(self, hooks: list[tuple[str, Any]]) -> None:
        """Accuse if one of pytest's hooks is from the patch, and not in the gold patch too."""
        inner = [unbound(function) for _, function in hooks]
        functions = [one for hook in hooks for one in hook] + inner
        self.busy = True
        try:
            if self.hooks is not None and self.hooks.are(functions):
                return
            self.hooks = Functions(functions)
        finally:
            self.busy = False
        for name, function in hooks:
            self._expect_hook(name, function)

    def _expect_hook(self, name: str, function: Any) -> None:
        code = self._code_of(unbound(function))
        path = None if code is None else self.origin(code)
        if path is None or (path in self.own and name in self.base[path] + self.gold):
            return
        self.accuse(f"the patch has a hook of pytest's: {name}")

    def expect_plugin(self, name: str) -> None:
        """Accuse if a plugin's file is from the patch, unless the gold patch changes it too."""
        if self.is_patched(name) and self.path(name) not in self.own:
            self.accuse(f"the patch registers a plugin: {name}")

    def _is_known(self, code: types.CodeType) -> bool:
        return id(code) in self.codes

    def expect_assertion(self, name: str, found: Any) -> None:
        """Accuse if an assertion method of tests is from the patch, unless gold has it there."""
        code = self._code_of(unbound(found))
        path = None if code is None else self.origin(code)
        if path is not None and not (path in self.own and name in self.base[path] + self.gold):
            self.accuse(f"the patch has an assertion of the tests: {name}")

    def expect_honest(self, one: Any, other: Any) -> None:
        """Accuse if one of two values equals other values that differ."""
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
        code = self._code_of(vars(kind)["__eq__"])
        if code is None or self.origin(code) is None or self._was_there(code):
            return
        if all(value == other for other in (plain, *_OTHERS[type(plain)](plain))):
            self.accuse(f"a {type(value).__name__} equals values that differ")

    def _was_there(self, code: types.CodeType) -> bool:
        try:
            pending = [compile(self.base[self.path(code.co_filename)], "base", "exec")]
        except (KeyError, SyntaxError, ValueError):
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
        """Record the parts of the runner, before the package is imported."""
        self.busy = True
        self.runner = parts(lambda name: name.split(".")[0] in WATCHED)
        self.seen = Seen(self.runner)
        self.busy = False

    def compare(self) -> None:
        """Accuse if the runner, or a function of the tests, has changed."""
        self.busy = True
        try:
            if self.seen is None or not self.seen.is_same():
                self._compare_runner()
            self._compare_tests()
        finally:
            self.busy = False

    def _compare_runner(self) -> None:
        now = parts(lambda name: name.split(".")[0] in WATCHED)
        for key, (value, code) in self.runner.items():
            found = now.get(key, (None, None))
            if (found[0] is not value or found[1] is not code) and self._is_foreign(found[0]):
                self.accuse(f"{'.'.join(key)} was changed")
        try:
            self.seen = Seen({key: now[key] for key in self.runner})
        except (KeyError, ValueError):
            self.seen = None  # the next comparison is a whole one too

    def _compare_tests(self) -> None:
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if not isinstance(path, str) or path in self.others:
                continue
            if not self.is_test(path):
                if os.path.isabs(path):
                    self.others.add(path)
                continue
            for key, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    kept = self.helpers.setdefault((name, key), value)
                    if kept is not value and self.origin(value.__code__) is not None:
                        self.accuse(f"{name}.{key} was changed")

    def _is_foreign(self, value: Any) -> bool:
        """Return whether a new part of the runner is from the patch or of unknown origin."""
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, types.CodeType):
            return self.origin(code) is not None or code.co_filename.startswith("<")
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


def equal_of(expect_honest: Callable[[Any, Any], None]) -> Callable[[Any, Any], Any]:
    """Return a function for ``==``; its attributes do not expose the guard."""

    def equal(one: Any, other: Any) -> Any:
        result = one == other
        expect_honest(one, other)
        return result

    return equal


def assertion_of(expect_assertion: Callable[[str, Any], None]) -> Callable[[Any, str], Any]:
    """Return a function for ``value.assertName``; it is protected like :func:`equal_of`'s."""

    def assertion(value: Any, name: str) -> Any:
        found = getattr(value, name)
        expect_assertion(name, found)
        return found

    return assertion


def _writes(mode: Any, flags: Any) -> bool:
    """Return whether the audit event ``open`` opens a file for writing."""
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


_OPENS = frozenset(("open", "read_text", "read_bytes", "getsource", "get_source", "getlines"))
"""Names in code of a package, such as a linter, that reads files on its own."""
_FRAMES = frozenset(("_getframe", "currentframe", "stack", "inspect"))
"""Names in code that reads frames on its own."""


def _reads(code: types.CodeType) -> bool:
    """Return whether code of a package reads files on its own."""
    return not (_OPENS.isdisjoint(code.co_names) or _is_pythons(code.co_filename))


def _is_unnamed(code: types.CodeType) -> bool:
    """Return whether code has no file name."""
    return code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")


def _is_pythons(path: str) -> bool:
    """Return whether a file is one of Python's own modules."""
    own = path.startswith(os.path.dirname(os.__file__) + os.sep)
    return path.startswith("<") or (own and "-packages" + os.sep not in path)


def _loads(code: types.CodeType) -> bool:
    """Return whether code executes modules that are imported."""
    name = code.co_filename
    rewrites = os.path.join("_pytest", "assertion", "rewrite.py")
    return name.startswith("<frozen importlib") or name.endswith(rewrites)


def _is_innocent(frame: Any, name: str) -> bool:
    """Return whether a library's frame does an operation on its own."""
    code: types.CodeType = frame.f_code
    path = code.co_filename
    file, folder = os.path.basename(path), os.path.basename(os.path.dirname(path))
    if name == "open":  # importing a module
        return code.co_name == "exec_module" and _loads(code)
    if name == "folder":  # removing a folder with its content
        return file == "shutil.py" or not _is_pythons(path)
    if name == "process":
        asked = file in STARTERS or folder in STARTERS_IN or path == __file__
        return not (asked or path.startswith("<"))
    if name == "sys._getframe":
        if file == "__init__.py" and folder == "logging":  # it also returns frames to others
            caller = frame.f_back
            return bool(caller is not None and caller.f_code.co_filename == path)
        gives = code.co_name in ("extract_stack", "print_stack", "format_stack", "walk_stack")
        return not (gives or file in HELPERS or _FRAMES.isdisjoint(code.co_names))
    if name.startswith("ctypes."):
        return folder != "ctypes" or code.co_name == "<module>"
    if name in ("tb_frame", "gi_frame", "cr_frame"):
        walks = code.co_name in ("walk_tb", "walk_stack")
        return folder == "asyncio" or (file == "traceback.py" and not walks)
    return False


def parts(is_wanted: Callable[[str], bool]) -> dict[Any, Any]:
    """Return the functions, classes and members of loaded modules, each with its code."""
    found: dict[Any, Any] = {}
    for name, module in list(sys.modules.items()):
        if not is_wanted(name) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            # Objects with custom attribute access, such as pytest.mark, are not queried.
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


class Functions:
    """Functions and what they refer to; finds quickly that all are still the same.

    Reading ``__code__`` is an audit event for each function. What they refer to contains the code.
    The builtins used here are those from before the package is imported.
    """

    def __init__(self, functions: list[Any]) -> None:
        self.functions = functions
        self.referents = gc.get_referents(*functions)

    def are(
        self,
        functions: list[Any],
        all: Any = all,
        map: Any = map,
        len: Any = len,
        referents_of: Any = gc.get_referents,
    ) -> bool:
        """Return whether these are the same functions, with the same code."""
        if len(functions) != len(self.functions) or not all(map(is_, functions, self.functions)):
            return False
        found, known = referents_of(*functions), self.referents
        same: bool = len(found) == len(known) and all(map(is_, found, known))
        return same


class Seen:
    """Parts of the runner as they were compared last; finds quickly that all are still the same.

    It compares the same objects as a whole comparison does (see :class:`Functions`).

    Raises:
        ValueError: If the code of a function is no longer that of the comparison.
    """

    def __init__(self, runner: dict[Any, Any]) -> None:
        names = dict.fromkeys(key[0] for key in runner)
        self.modules = [(name, sys.modules[name], vars(sys.modules[name])) for name in names]
        scopes: dict[Any, Any] = {(name,): scope for name, _, scope in self.modules}
        held: dict[Any, dict[str, Any]] = {}
        functions: list[Any] = []
        for key, (value, code) in runner.items():
            if len(key) == 2 and isinstance(value, type):
                scopes[key] = scope = type.__dict__["__dict__"].__get__(value)
                if "__module__" in scope:
                    held[key] = {"__module__": scope["__module__"]}
            held.setdefault(key[:-1], {})[key[-1]] = value
            if code is not None:
                functions += [value, *inner_of(value)]
                if gc.get_referents(functions[-1])[0] is not code:
                    raise ValueError(f"{'.'.join(key)} was changed meanwhile")
        self.functions = Functions(functions)
        self.held, self.values = [], []
        for key, found in held.items():
            first = next(iter(found))  # twice, because the values of one key are not a tuple
            self.held.append((scopes[key], itemgetter(*found, first)))
            self.values += [*found.values(), found[first]]

    def is_same(self, all: Any = all, map: Any = map, vars: Any = vars) -> bool:
        """Return whether modules, classes, functions and their code are the same objects."""
        now: list[Any] = []
        try:
            for name, module, scope in self.modules:
                if sys.modules[name] is not module or vars(module) is not scope:
                    return False
            for scope, get in self.held:
                now += get(scope)
        except KeyError:
            return False
        return all(map(is_, now, self.values)) and self.functions.are(self.functions.functions)


def unbound(function: Any) -> Any:
    """Return the function behind methods and partial calls."""
    while isinstance(function, (types.MethodType, functools.partial)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def name_of(frame: Any) -> str:
    """Return the name by which a frame's function is called: its class for a special method."""
    code = frame.f_code
    name: str = code.co_name
    if name.startswith("__") and code.co_argcount:
        kind = type(frame.f_locals.get(code.co_varnames[0]))
        for one in type.__dict__["__mro__"].__get__(kind):
            if code_of(type.__dict__["__dict__"].__get__(one).get(name)) is code:
                return str(type.__dict__["__name__"].__get__(one))
    return name


def code_of(member: Any) -> Any:
    """Return the code behind a function, method or property; None if there is none."""
    member = ([member, *inner_of(member)])[-1]
    return member.__code__ if isinstance(member, types.FunctionType) else None


def inner_of(member: Any) -> list[Any]:
    """Return the function that a method or property holds, if it is one that holds another."""
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    return [member.fget] if isinstance(member, property) else []


class _Watched(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> Any:
        """Replace ``a == b`` by a call that checks both values."""
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        return _call(EQUAL, node, [node.left, node.comparators[0]])

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Replace ``a.assertName`` by a call that checks the attribute."""
        self.generic_visit(node)
        if not node.attr.startswith("assert") or not isinstance(node.ctx, ast.Load):
            return node
        return _call(ASSERTION, node, [node.value, ast.Constant(node.attr)])


def _call(name: str, node: Any, arguments: list[ast.expr]) -> ast.Call:
    """Return a call of a guard function; through ``__call__``, because Python warns about texts."""
    called = ast.Attribute(ast.Constant(name), "__call__", ast.Load())
    return ast.copy_location(ast.Call(called, arguments, []), node)
