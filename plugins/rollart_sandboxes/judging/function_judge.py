"""Judges one function by its hidden test: a single file for any Python from 3.8, for a sandbox.

Takes: one JSON object on stdin (``HiddenTest.request``). Gives: one JSON line on stdout that
contains the request's nonce. Never: lets the candidate into the process that holds the test.

    judge (this process)                                candidate (a separate process)
      the hidden test, the nonce, stdout                  its source, one end of a socket
      check(call) -- entry point's arguments as data -->  function(*arguments)
                  <-- its result as data ---------------

The candidate answers with plain values (numbers, text, lists, ...), from which the judge builds new
objects. Therefore nothing that the candidate does in its own process counts: an early exit,
``atexit``, patched builtins, an ``__eq__`` that is always true, or prints. It has no stdout. On
Linux it cannot read the judge's memory or files: the judge is not dumpable, and if the judge is
root, the candidate has no capabilities.

A function that changes its arguments changes copies. This format does not support tests that
inspect the arguments.

The verdict has two reasons: ``reason`` for logs, and ``told`` for the agent. The candidate sees the
test's arguments and could put them into its errors. Therefore ``told`` only contains fixed words,
names of builtin exceptions and the compiler's message about the source.

It runs as a file, or without one (``BOOTSTRAP``), so that no file in the sandbox can replace it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
from typing import Any

MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 24
DEPTH = 50

BOOTSTRAP = "import sys; SOURCE = sys.argv.pop(1); exec(compile(SOURCE, 'judge.py', 'exec'))"
"""For ``python -c BOOTSTRAP source``."""
SOURCE = globals().get("SOURCE", "")
OUT_OF_TIME = "it ran out of time"


def pack(value: Any, depth: int = 0) -> Any:
    """Return a plain value in a form for JSON; raise TypeError for anything else."""
    kind = type(value)
    if depth > DEPTH:
        raise TypeError("too deep")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": format(value, "x")}  # hex: decimal is limited to 4,300 digits
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is list:
        return [pack(item, depth + 1) for item in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [pack(item, depth + 1) for item in value]}
    if kind is dict:
        pairs = [[pack(k, depth + 1), pack(v, depth + 1)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, (int, float, str, list, tuple, set, frozenset, dict)):
        return pack(_plain(value), depth)
    raise TypeError(f"a {kind.__name__} is not a plain value")


def _plain(value: Any) -> Any:
    """Return a value of a subclass (a Counter, a numpy float) as its plain class."""
    for kind in (int, float, str, list, tuple, frozenset, set, dict):
        if isinstance(value, kind):
            make: Any = kind
            return make(value)
    raise TypeError("not a plain value")


def unpack(value: Any) -> Any:
    """Return the value that :func:`pack` packed; it contains only builtin classes."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, list):
        return [unpack(item) for item in value]
    ((kind, held),) = value.items()
    if kind == "dict":
        return {unpack(k): unpack(v) for k, v in held}
    if kind in _BUILDERS:
        return _BUILDERS[kind](held)
    raise ValueError(f"unknown kind {kind!r}")


_BUILDERS: dict[str, Any] = {
    "int": lambda held: int(held, 16),
    "float": float.fromhex,
    "complex": lambda held: complex(float.fromhex(held[0]), float.fromhex(held[1])),
    "bytes": bytes.fromhex,
    "bytearray": lambda held: bytearray(bytes.fromhex(held)),
    "tuple": lambda held: tuple(unpack(item) for item in held),
    "set": lambda held: {unpack(item) for item in held},
    "frozenset": lambda held: frozenset(unpack(item) for item in held),
}


def send(link: socket.socket, message: Any) -> None:
    """Send one message: its length on a line, then JSON."""
    body = json.dumps(message).encode("utf-8", "surrogatepass")
    link.sendall(b"%d\n" % len(body) + body)


def receive(reader: Any) -> Any:
    """Return the next message; raise EOFError if the other side has ended."""
    head = reader.readline(20)
    if not head.endswith(b"\n"):
        raise EOFError("the candidate's process ended")
    size = int(head)
    if not 0 <= size <= MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    body = reader.read(size)
    if len(body) != size:
        raise EOFError("the candidate's process ended")
    return json.loads(body.decode("utf-8", "surrogatepass"))


class CandidateError(BaseException):
    """The candidate failed or sent an invalid answer; no ``except Exception`` catches this."""


class Candidate:
    """A candidate in a separate process, called like the function it contains."""

    def __init__(self) -> None:
        self.problem = self.told = ""
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", *_program(), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0"},
            )
        self._reader = self._link.makefile("rb")

    def load(self, source: str, entry_point: str, cpu_s: int) -> None:
        """Run the source in the process."""
        self._ask({"source": source, "entry_point": entry_point, "cpu_s": cpu_s})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the candidate's function; an exception it raises is raised here."""
        answer = self._ask({"args": pack(list(args)), "kwargs": pack(kwargs)})
        if "raised" in answer:
            raise _raised(answer["raised"])
        try:
            return unpack(answer["value"])
        except Exception as error:
            problem = f"its answer cannot be read: {type(error).__name__}"
            raise self.failed(problem, UNREAD) from None

    def _ask(self, message: Any) -> Any:
        try:
            send(self._link, message)
            answer = receive(self._reader)
        except (OSError, EOFError) as error:
            raise self.failed(str(error) or type(error).__name__, "its process ended") from None
        except (ValueError, RecursionError) as error:
            raise self.failed(str(error) or type(error).__name__, UNREAD) from None
        if not isinstance(answer, dict):
            raise self.failed("its answer cannot be read", UNREAD)
        if "refused" in answer:
            name, _, said = str(answer["refused"]).partition(": ")
            told = f"it does not load: {_builtin(name)}"
            raise self.failed(f"it does not load: {name}: {said}", told)
        return answer

    def failed(self, problem: str, told: str) -> CandidateError:
        """Return an error to raise, and store it, because a test might catch everything."""
        self.problem, self.told = problem, told
        return CandidateError(problem)

    def close(self) -> None:
        """Kill the process and its group."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.close()
        self._link.close()


UNREAD = "it returned a value that is not plain data"


def _program() -> list[str]:
    """Return the arguments with which Python starts this program again."""
    return ["-c", BOOTSTRAP, SOURCE] if SOURCE else [os.path.abspath(__file__)]


def _builtin(name: str) -> str:
    """Return the name of a builtin exception, or a general text for any other."""
    kind = getattr(__import__("builtins"), name, None)
    is_plain = isinstance(kind, type) and issubclass(kind, BaseException)
    return name if is_plain else "an exception of its own"


def _raised(name: Any) -> BaseException:
    kind: Any = getattr(__import__("builtins"), str(name), None)
    is_plain = isinstance(kind, type) and issubclass(kind, Exception)
    try:
        return kind("raised by the candidate") if is_plain else RuntimeError(str(name))
    except TypeError:
        return RuntimeError(str(name))


def _serve(link: socket.socket) -> None:
    """Act as the candidate: run its source, then answer calls until the judge has ended."""
    reader = link.makefile("rb")
    order = receive(reader)
    _limit(order["cpu_s"])
    names = {"__name__": "candidate", "__builtins__": __builtins__}
    try:
        exec(compile(order["source"], "candidate.py", "exec", dont_inherit=True), names)
        function: Any = names[order["entry_point"]]
    except BaseException as error:
        send(link, {"refused": f"{type(error).__name__}: {str(error)[:200]}"})
        return
    send(link, {})
    while True:
        call = receive(reader)
        try:
            answer = {"value": pack(function(*unpack(call["args"]), **unpack(call["kwargs"])))}
        except BaseException as error:
            answer = {"raised": type(error).__name__}
        send(link, answer)


def _limit(cpu_s: int) -> None:
    import resource

    for what, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def _hide() -> None:
    """Protect this process's memory and files from the candidate, on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None).prctl
        prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: not readable by other processes of the same user
        for capability in range(64):
            prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: children of root get no capabilities


def judge(request: Any) -> Any:
    """Return the verdict on one request: ``passed``, or ``failed`` with a reason."""
    candidate = Candidate()
    _ring_after(request["timeout_s"], candidate)
    told = ""
    try:
        reason = _run_test(request, candidate)
    except AssertionError:
        reason, told = "an assertion of the hidden test failed", "it returned a wrong result"
    except BaseException as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        told = f"{_builtin(type(error).__name__)} was raised"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        candidate.close()
    told = candidate.told or told
    return {"verdict": "failed" if reason else "passed", "reason": reason, "told": told}


def _run_test(request: Any, candidate: Candidate) -> str:
    """Run the hidden test on the candidate; the test uses the reference's helpers."""
    names: Any = {"__name__": "hidden_test"}
    exec(compile(request["reference"], "reference.py", "exec", dont_inherit=True), names)
    cpu_s = math.ceil(request["timeout_s"]) + 1
    problem = _syntax(request["candidate"])
    if problem:
        raise candidate.failed(problem, problem)
    candidate.load(request["candidate"], request["entry_point"], cpu_s)
    names[request["entry_point"]] = candidate
    exec(compile(request["test"], "hidden_test.py", "exec", dont_inherit=True), names)
    return candidate.problem


def _syntax(source: str) -> str:
    """Return the compiler's error about a source; empty if there is none."""
    try:
        compile(source, "candidate.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"it is not valid Python: {error.msg} (line {error.lineno})"
    except (ValueError, MemoryError, RecursionError) as error:
        return f"it is not valid Python: {type(error).__name__}"
    return ""


def _ring_after(timeout_s: float, candidate: Candidate) -> None:
    """Raise an error after this time, wherever the test is then."""

    def ring(*_: Any) -> None:
        raise candidate.failed(f"out of time: {timeout_s:.3g} s", OUT_OF_TIME)

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)


def main() -> None:
    """Judge the request on stdin."""
    _hide()
    request = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
    answer = dict(judge(request), nonce=request["nonce"])
    # The test itself may print before the answer, perhaps without a final newline.
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        main()
