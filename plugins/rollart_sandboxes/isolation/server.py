"""The env server: environments of one session module, in this process or in a separate one.

Takes: the path of a session module, which is :mod:`rollart_sandboxes.isolation.session` for any
RollArt environment and one of :mod:`rollart_plugins.adapters.sessions` for a foreign package.
Gives: slots, one for each environment, that answer in plain values; as a script, the same over JSON
lines on stdin and stdout: ``{"id", "call", "seat", "args"}`` to ``{"id", "value"}`` or
``{"id", "error"}``. Never: needs more than Python 3.8 and the standard library, or outlives its
stdin.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import queue
import random
import sys
import threading
import traceback
from typing import Any, TextIO

_importing = threading.Lock()
_global_random = threading.RLock()
_modules: dict[str, Any] = {}
_MT19937_BYTES = 4 * 624 + 4
"""Size of the words and the position of the generator."""
_FIRST_SEED = 1_936_287_828
"""Seed of a session's state before it seeds itself; other code is unlikely to use this value."""


def load(path: str) -> Any:
    """Load a session module by its path, independent of the packages around it."""
    with _importing:
        if path not in _modules:
            stem = os.path.splitext(os.path.basename(path))[0]
            name = f"rollart_session_{stem}_{len(_modules)}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            _modules[path] = module
        # One thread at a time: packages with import cycles do not support concurrent imports.
        for needed in _modules[path].IMPORTS:
            importlib.import_module(needed)
        return _modules[path]


def describe(path: str, env_id: str, options: dict[str, Any]) -> Any:
    """Return the module's description of an environment."""
    module = load(path)
    return plain(_guard(module).run("describe", lambda: module.describe(env_id, dict(options))))


class EnvSlot:
    """One session, with answers in plain values."""

    def __init__(self, path: str, env_id: str, options: dict[str, Any]) -> None:
        """Open a session."""
        module = load(path)
        self._guard = _guard(module)
        self._session = self._guard.run("open", lambda: module.Session(env_id, dict(options)))
        self._closed = False

    def facts(self) -> Any:
        """Return the session's properties."""
        session = self._session
        return plain(
            {
                "offers": list(getattr(session, "offers", ())),
                "prompt": getattr(session, "prompt", None),
                "max_turns": getattr(session, "max_turns", None),
                "splits": getattr(session, "splits", None),
                "messages": bool(getattr(session, "messages", False)),
            }
        )

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[Any, Any]:
        """Begin an episode."""
        observation, info = self._guard.run("reset", lambda: self._session.reset(seed, task))
        return plain(observation), plain(info)

    def step(self, action: str) -> tuple[Any, float, bool, bool, Any]:
        """Act."""
        answer = self._guard.run("step", lambda: self._session.step(action))
        observation, reward, terminated, truncated, info = answer
        ends = bool(terminated), bool(truncated)
        return (plain(observation), float(reward), ends[0], ends[1], plain(info))

    def oracle(self) -> str | None:
        """Return the expert's next action."""
        advice: str | None = plain(self._guard.run("oracle", self._session.oracle))
        return advice

    def secrets(self) -> list[str]:
        """Return texts that the agent must not read."""
        return [str(s) for s in self._guard.run("secrets", self._session.secrets)]

    def num_tasks(self, split: str) -> int | None:
        """Return the number of tasks of a split."""
        said = self._guard.run("num_tasks", lambda: self._session.num_tasks(split))
        count: int | None = plain(said)
        return count

    def task_clusters(self, split: str) -> list[str] | None:
        """Return a name for each task of a split; similar tasks have the same name."""
        said = self._guard.run("task_clusters", lambda: self._session.task_clusters(split))
        return None if said is None else [str(name) for name in said]

    def corpus(self) -> list[str]:
        """Return text for a tokenizer."""
        return [str(s) for s in self._guard.run("corpus", lambda: list(self._session.corpus()))]

    def close(self) -> None:
        """Close the session, once."""
        if not self._closed:
            self._closed = True
            self._guard.run("close", self._session.close)


class _Unguarded:
    """The guard for packages that use only their own random generators."""

    def run(self, call: str, function: Any) -> Any:
        """Call the function."""
        return function()


class _OwnRandom:
    """Lends the interpreter's global generators to one session at a time."""

    def __init__(self) -> None:
        self._python = random.Random(0).getstate()
        self._numpy = _OwnNumpyRandom()

    def run(self, call: str, function: Any) -> Any:
        """Call the function with the session's own states in place."""
        with _global_random:
            outer = random.getstate()
            random.setstate(self._python)
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                self._numpy.lend(numpy, call)
            try:
                return function()
            finally:
                self._python = random.getstate()
                random.setstate(outer)
                if numpy is not None:
                    self._numpy.take_back(numpy, call)


class _OwnNumpyRandom:
    """A session's state of ``numpy.random``.

    Reading and setting the whole state costs more than most steps. Therefore, once a call was seen
    not to use the generator, only the state's memory is swapped for it. If the call does use it
    later, the only data outside that memory, a normal number kept for the next call, is dropped.
    """

    def __init__(self) -> None:
        self._mine: Any = None
        self._my_memory = b""
        self._outer: Any = None
        self._calm: set[str] = set()
        self._touching: set[str] = set()

    def lend(self, numpy: Any, call: str) -> None:
        """Replace the outer state with the session's state."""
        memory = _memory(numpy)
        if memory is not None and call in self._calm - self._touching:
            self._outer = memory.raw
            memory.raw = self._my_memory
            return
        self._outer = numpy.random.get_state(legacy=False)
        if self._mine is None:
            self._mine = numpy.random.RandomState(_FIRST_SEED).get_state(legacy=False)
        numpy.random.set_state(self._mine)
        if memory is not None:
            self._my_memory = memory.raw

    def take_back(self, numpy: Any, call: str) -> None:
        """Restore the outer state, and record whether the call changed the session's state."""
        memory = _memory(numpy)
        careful = not isinstance(self._outer, bytes)
        touched = memory is None or memory.raw != self._my_memory
        if careful or touched:
            after = numpy.random.get_state(legacy=False)
            touched = touched or after["gauss"] != self._mine["gauss"]
            self._mine, self._my_memory = after, b"" if memory is None else memory.raw
        if careful:
            numpy.random.set_state(self._outer)
        elif memory is not None:
            memory.raw = self._outer
            if touched:
                state = numpy.random.get_state(legacy=False)
                numpy.random.set_state({**state, "has_gauss": 0, "gauss": 0.0})
        (self._touching if touched else self._calm).add(call)


def _memory(numpy: Any) -> Any:
    """Return the memory of NumPy's global generator; None if it is not an MT19937."""
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return None
    return (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)


def _guard(module: Any) -> _OwnRandom | _Unguarded:
    return _OwnRandom() if getattr(module, "GLOBAL_RANDOM", False) else _Unguarded()


def plain(value: Any) -> Any:
    """Return a value as JSON would return it; values without a JSON form are left out."""
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if _is_plain(v)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value if _is_plain(v)]
    return plain(value.tolist())  # scalars and arrays of numpy


def _is_plain(value: object) -> bool:
    known = (bool, str, int, float, dict, list, tuple)
    if value is None or isinstance(value, known):
        return True
    return getattr(getattr(value, "dtype", None), "kind", "") in ("b", "i", "u", "f", "U")


class _Server:
    """Answers the calls of one client; each slot has its own thread."""

    def __init__(self, path: str, answers: TextIO) -> None:
        self._path = path
        self._answers = answers
        self._writing = threading.Lock()
        self._queues: dict[int, queue.SimpleQueue[Any]] = {}

    def handle(self, request: dict[str, Any]) -> None:
        """Pass a request to the thread of its slot."""
        key = request["seat"]
        if key not in self._queues:
            self._queues[key] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._queues[key],), daemon=True).start()
        self._queues[key].put(request)
        if request["call"] in ("close", "describe"):
            del self._queues[key]

    def _work(self, requests: queue.SimpleQueue[Any]) -> None:
        slot: EnvSlot | None = None
        while True:
            request = requests.get()
            value = None
            call, args = request["call"], request["args"]
            try:
                if call == "describe":
                    value = describe(self._path, *args)
                elif call == "open":
                    slot = EnvSlot(self._path, *args)
                    value = slot.facts()
                elif slot is not None:
                    value = getattr(slot, call)(*args)
                line = json.dumps({"id": request["id"], "value": value})
            except BaseException as e:  # also SystemExit of foreign code: the client gets the error
                line = json.dumps({"id": request["id"], "error": _error(e)})
            self._send(line)
            if call in ("close", "describe"):
                return

    def _send(self, line: str) -> None:
        with self._writing:
            self._answers.write(line + "\n")
            self._answers.flush()


def _error(error: BaseException) -> dict[str, Any]:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    names = [cls.__name__ for cls in type(error).__mro__]
    try:
        message = str(error)
    except Exception:  # raised by foreign code
        message = "its message cannot be read"
    return {"types": names, "message": message, "trace": trace[-4000:]}


def main(path: str) -> None:
    """Serve until stdin ends; output of foreign code goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.setswitchinterval(0.0005)  # an environment that computes must not delay requests
    server = _Server(path, answers)
    for line in requests:
        server.handle(json.loads(line))
    os._exit(0)  # do not wait for threads in foreign code


if __name__ == "__main__":
    # The folder of this script contains modules named after foreign packages.
    sys.path[0] = os.getcwd()
    main(sys.argv[1])
