r"""Run tests in one process and observe them from another: one file for Python 3.8 or newer.

Takes: one JSON line on stdin, and the runner's arguments after the program: ``{"nonce": ...,
"path": ..., "runner": "pytest", "unittest", "django" or "sympy", "packages": [...], "sources":
[...]}`` (the last two are folders for ``sys.path``), ``environment`` (a folder for the virtual
environment of processes that the tests start), and the input of :class:`guard.Guard`. Gives: a file
of JSON lines, each numbered and signed with the nonce; the last one has the runner's exit code.
Never: exposes the nonce or the file to the tests' process, or prints.

    observer (this process)                          tests (its child, forked before the nonce came)
      the nonce, the report  <-- lines with a key --   guard, reporter, runner, the tested code

``guard.py`` is in the same folder. The runner is imported from the packages before the repository
is on the path. The output of a test is not a report. If the process ends early, the report has no
end and proves nothing; the same holds for a run in which the guard accuses (``TAMPERED``). The
tested code shares a process with reporter and guard, so code that uses no operation audited by
Python can find the key in memory (SECURITY.md lists the ways).
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any

TAMPERED = 71
"""The end of a run in which the tests or their runner were manipulated."""
LINE_BYTES = 1 << 16
RUNNER = ("_pytest", "pluggy", "iniconfig", "packaging")
"""Packages that pytest consists of."""


def signed_text(record: dict[str, Any]) -> bytes:
    """Return the signed part of a record: all but the signature, with sorted keys."""
    rest = {key: value for key, value in record.items() if key != "mac"}
    return json.dumps(rest, sort_keys=True).encode()


class Link:
    """Writes numbered and signed records to a file descriptor."""

    def __init__(self, key: str, file: int) -> None:
        self._sign = hmac.new(key.encode(), digestmod=hashlib.sha256).copy
        self._file, self._count = file, 0

    def write(self, record: dict[str, Any]) -> None:
        """Number, sign and write a record."""
        record = dict(record, n=self._count)
        self._count += 1
        signature = self._sign()
        signature.update(signed_text(record))
        os.write(self._file, (json.dumps(dict(record, mac=signature.hexdigest())) + "\n").encode())


# The observer.


def observe(order: dict[str, Any], child: int, order_to: int, lines_from: int) -> int:
    """Send the order to the tests' process, follow it to its end, and write the report."""
    nonce, path = order.pop("nonce"), order.pop("path")
    key = order["key"] = os.urandom(16).hex()
    report = Link(nonce, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with os.fdopen(order_to, "w") as to:
        to.write(json.dumps(order))
    records = follow(lines_from, child)
    code = records.pop()["end"]
    end, tampered, done = None, "", []
    for number, record in enumerate(records):
        mac = record.pop("mac", "")
        right = hmac.new(key.encode(), signed_text(record), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(str(mac), right) or record.pop("n") != number:
            tampered = tampered or "a line that the reporter did not write"
        elif "tampered" in record:
            tampered = tampered or str(record["tampered"])
        elif end is not None:
            tampered = tampered or "a line after the end"
        elif "end" in record:
            end = record["end"]
        else:
            done.append(record)
    for record in done:
        report.write(record)
    if tampered:
        report.write({"end": TAMPERED, "why": tampered[:500]})
    elif end is not None and end == code:
        report.write({"end": end})
    return int(code)


def follow(lines_from: int, child: int) -> list[dict[str, Any]]:
    """Return the records of a child, then its exit code; its remaining processes are killed."""
    ended: list[int] = []

    def wait() -> None:
        ended.append(os.waitpid(child, 0)[1])

    waiter = threading.Thread(target=wait)
    waiter.start()
    parts: list[bytes] = []
    os.set_blocking(lines_from, False)
    while True:
        over = not waiter.is_alive()
        try:
            part = os.read(lines_from, LINE_BYTES)
        except BlockingIOError:
            if over:
                break
            waiter.join(0.02)
            continue
        if not part:
            break
        parts.append(part)
    waiter.join()
    kill_children()
    status = ended[0]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    return [*map(parsed, b"".join(parts).splitlines()), {"end": code}]


def parsed(line: bytes) -> dict[str, Any]:
    """Return a line's record; an empty, unsigned one if it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and "n" in record else {}


def kill_children() -> None:
    """Kill processes that the tests left running; they are now children of this process."""
    for _ in range(100):
        try:
            with open("/proc/self/task/%d/children" % os.getpid()) as file:  # noqa: UP031
                left = [int(pid) for pid in file.read().split()]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            for pid in left:
                os.waitpid(pid, 0)
        except OSError:
            return
        if not left:
            return


def seclude() -> None:
    """Block access from other processes of this user, and become the parent of orphans."""
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    except (OSError, AttributeError):
        pass


# The tests' process.


class Hooks:
    """A pytest plugin of functions, which keep their state in closures.

    The tested code can find it among pytest's plugins.
    """

    def __init__(self, *hooks: Any) -> None:
        vars(self).update({hook.__name__: hook for hook in hooks})


def loader(plugins: list[list[str]]) -> Any:
    """Return a plugin that registers those of installed packages; no other is loaded."""

    def register(pluginmanager: Any) -> None:
        blocked = {word[3:] for word in sys.argv if word.startswith("no:")}
        blocked |= {word[5:] for word in sys.argv if word.startswith("-pno:")}
        for name, module in plugins:
            if name not in blocked and not pluginmanager.has_plugin(name):
                pluginmanager.register(importlib.import_module(module), name)

    def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
        register(pluginmanager)

    def pytest_addhooks(pluginmanager: Any) -> None:  # pytest before 5.4 has no other with it
        register(pluginmanager)

    from _pytest.hookspec import pytest_addoption as known

    is_new = "pluginmanager" in known.__code__.co_varnames
    return Hooks(pytest_addoption if is_new else pytest_addhooks)


def watcher(guard: Any, failed: set[str]) -> Any:
    """Return a plugin that compares the runner, and checks itself whether a test fails."""
    import pytest

    def pytest_collection_finish(session: Any) -> None:
        guard.compare()
        for item in session.items:
            expect_item(guard, item)

    def pytest_runtest_call(item: Any) -> Any:
        expect_item(guard, item)
        expect_plugins(guard, item.config.pluginmanager)
        outcome = yield
        if outcome.excinfo is not None or getattr(item, "_excinfo", None):
            failed.add(item.nodeid)
        expect_item(guard, item)

    pytest.hookimpl(hookwrapper=True, tryfirst=True)(pytest_runtest_call)
    return Hooks(pytest_collection_finish, pytest_runtest_call)


def expect_item(guard: Any, item: Any) -> None:
    """Accuse unless the function that runs as a test is that of its file."""
    guard.expect_own(getattr(item, "obj", None))
    guard.expect_run(vars(item).get("runtest"), item.nodeid)


def expect_plugins(guard: Any, manager: Any) -> None:
    """Accuse if a plugin, or a hook, is from the patch."""
    for plugin in manager.get_plugins():
        owner = plugin if isinstance(plugin, types.ModuleType) else type(plugin)
        module = sys.modules.get(str(getattr(owner, "__module__", owner.__name__)), owner)
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            guard.expect_plugin(path)
    guard.expect_hooks(
        [
            (name, found.function)
            for name, hook in list(vars(manager.hook).items())
            if hasattr(hook, "get_hookimpls")
            for found in hook.get_hookimpls()
        ]
    )


def reporter(write: Any, guard: Any, failed: set[str]) -> Any:
    """Return a plugin that writes one record per test."""
    statuses: dict[str, str] = {}
    configs: list[Any] = []

    def named(nodeid: str) -> str:
        relative = getattr(configs[0], "cwd_relative_nodeid", None) if configs else None
        return str(relative(nodeid)) if relative is not None else nodeid

    def pytest_configure(config: Any) -> None:
        configs.append(config)  # it has pytest's format of ids

    def pytest_runtest_logreport(report: Any) -> None:
        status = status_of(report)
        failures = ("FAILED", "ERROR")
        if status is None or (statuses.get(report.nodeid) in failures and status not in failures):
            return  # a test passes in spite of a failed subtest, which has a report of its own
        statuses[report.nodeid] = status

    def pytest_runtest_logfinish(nodeid: str) -> None:
        guard.compare()
        status = statuses.pop(nodeid, None)
        if nodeid in failed and status in ("PASSED", "XPASS"):
            guard.accuse("a test that failed is said to pass")
        failed.discard(nodeid)
        if status is not None:
            write({"id": named(nodeid), "status": status})

    def pytest_collectreport(report: Any) -> None:
        if report.failed:
            write({"id": named(report.nodeid), "status": "ERROR"})

    reports = (pytest_runtest_logreport, pytest_runtest_logfinish, pytest_collectreport)
    return Hooks(pytest_configure, *reports)


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


def run_pytest(write: Any, guard: Any, sources: list[str]) -> int:
    """Run pytest; no plugin is loaded by an entry point in the repository."""
    import unittest.async_case
    import unittest.mock  # noqa: F401 - watched too, and pytest loads it late

    is_own = guard.is_runner and any(importlib.util.find_spec(name) is None for name in RUNNER)
    if is_own:
        guard.trust()
        look_in(sources)
        sources = []
    import _pytest.assertion.rewrite as rewrite
    import pytest

    plugins = installed_plugins()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    asserts, rewritten = rewrite.rewrite_asserts, rewrite._rewrite_test

    def rewrite_asserts(mod: Any, *rest: Any) -> None:
        # The path is a text, or a py.path in pytest before 5; the source is bytes.
        paths = [str(one) for one in rest if isinstance(one, str) or hasattr(one, "strpath")]
        if paths and guard.is_test(paths[0]):
            guard.guarded(mod)
        asserts(mod, *rest)

    def rewrite_test(*arguments: Any) -> Any:
        stat, code = rewritten(*arguments)  # the path comes first, or after the config
        is_test = any(guard.is_test(str(one)) for one in arguments)
        return stat, guard.known(code) if is_test else code

    rewriter: Any = rewrite  # its functions differ between versions
    rewriter.rewrite_asserts, rewriter._rewrite_test = rewrite_asserts, rewrite_test
    if not is_own:  # its tests call it
        rewriter._read_pyc = lambda *rest, **named: None
    guard.watch()
    look_in(sources)
    failed: set[str] = set()
    own = [loader(plugins), watcher(guard, failed), reporter(write, guard, failed)]
    return int(pytest.main(sys.argv[1:], plugins=own))


def installed_plugins() -> list[list[str]]:
    """Return name and module of the plugins of packages outside the current folder."""
    from importlib import metadata

    root = os.path.realpath(os.getcwd()) + os.sep
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        if os.path.realpath(str(distribution.locate_file("x"))).startswith(root):
            continue
        for entry in distribution.entry_points:
            if entry.group == "pytest11":
                found.setdefault(entry.name, entry.value.split(":")[0].strip())
    return [[name, module] for name, module in sorted(found.items())]


def look_in(folders: list[str]) -> None:
    """Import from these folders from now on; the current one first, as ``python -m pytest`` does.

    Isolated Pythons have no folder of the program at the start of the path.
    """
    isolated = bool(sys.flags.isolated)
    sys.path[: 0 if isolated else 1] = [os.getcwd(), *folders]


def environment(folder: str, found_in: list[str]) -> None:
    """Let processes that the tests start import from folders, also if they set PYTHONPATH.

    It is a virtual environment, as the tests have where their project is installed.
    """
    python = os.path.realpath(sys.executable)
    name = "python" + ".".join(map(str, sys.version_info[:2]))
    programs = os.path.join(folder, "bin")
    site = os.path.join(folder, "lib", name, "site-packages")
    for path in (programs, site):
        os.makedirs(path)
    for link in ("python", "python3", name):
        os.symlink(python, os.path.join(programs, link))
    with open(os.path.join(folder, "pyvenv.cfg"), "w") as file:
        file.write("home = " + os.path.dirname(python) + "\n")
    with open(os.path.join(site, "task.pth"), "w") as file:
        file.writelines(path + "\n" for path in found_in)
    sys.executable = os.path.join(programs, "python")
    os.environ["PATH"] = programs + os.pathsep + os.environ.get("PATH", os.defpath)
    os.environ.pop("PYTHONPATH", None)


def run_tests(order: dict[str, Any], lines_to: int) -> int:
    """Run the tests with a reporter; return the runner's exit code."""
    if folder := order.pop("environment", ""):
        environment(folder, [*(order["sources"] or [os.getcwd()]), *order["packages"]])
    sys.path[1:1] = order.get("packages", [])
    guard, others, write = connected(order, lines_to)
    sys.modules["__main__"] = types.ModuleType("__main__")
    runner = order.get("runner", "pytest")
    run = run_pytest if runner == "pytest" else getattr(others, "run_" + runner)
    code = int(run(write, guard, order.get("sources", [])))
    guard.compare()
    write({"end": code})
    return code


def connected(order: dict[str, Any], lines_to: int) -> Any:
    """Return a guard, and a function that writes records; it rejects callers from the patch."""
    link, own, lock = Link(order.pop("key"), lines_to), os.getpid(), threading.RLock()
    main, frame_of = threading.main_thread(), sys._getframe

    def accuse(why: str) -> None:
        with lock:
            if os.getpid() == own:
                link.write({"tampered": why})

    folder = os.path.dirname(os.path.abspath(__file__))
    guard = loaded(os.path.join(folder, "guard.py")).Guard(order, accuse)
    others = loaded(os.path.join(folder, "unit_runners.py"))

    def write(record: dict[str, Any]) -> None:
        guard.busy = True
        frame: Any = frame_of(1)
        foreign = threading.current_thread() is not main
        while frame is not None and not foreign and not guard.is_trusting:
            foreign, frame = guard.origin(frame.f_code) is not None, frame.f_back
        guard.busy = False
        if foreign:
            accuse("the reporter was called by the patch")
        with lock:
            if os.getpid() == own:
                link.write(record)

    guard.compile_tests()
    sys.addaudithook(guard.audit)
    guard.report_processes()
    guard.hide_lines()
    return guard, others, write


def loaded(path: str) -> Any:
    """Return the module in a file; it cannot be imported by name."""
    spec = importlib.util.spec_from_file_location("rollart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Fork the tests' process, then read the order, which the tests must not see."""
    lines_from, lines_to = os.pipe()
    order_from, order_to = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        for file in (lines_from, order_to):
            os.close(file)
        with os.fdopen(order_from) as lines:
            order = json.loads(lines.read())
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        code = 1
        try:
            code = run_tests(order, lines_to)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for file in (lines_to, order_from):
        os.close(file)
    seclude()
    return observe(json.loads(sys.stdin.readline()), child, order_to, lines_from)


if __name__ == "__main__":
    sys.exit(main())
