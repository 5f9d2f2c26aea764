"""Processes that compare mathematics, started when first needed and kept for the next comparison.

Takes: comparisons, from any thread. Gives: what :mod:`rollart_rewards.math_child` answers. Never:
takes a process that could not be started for an answer, or leaves one behind.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rollart_rewards import math_child

_START_S: Final = 120.0
_SPENT: Final = frozenset({-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT})
"""How a process ends that an answer has brought down: time, stack or memory."""
_KNOWN: Final = {"wanted": ["1/2"], "said": "$0.5$"}


class MathProcesses:
    """A few processes that compare.

    Args:
        num_processes: Most at once; further callers wait.
    """

    def __init__(self, num_processes: int) -> None:
        self._free = threading.BoundedSemaphore(num_processes)
        self.idle: list[_Process] = []
        """Those that wait for the next comparison."""
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end_all, self.idle, self._lock)

    def compare(self, comparison: Mapping[str, Any], *, wall_s: float) -> dict[str, Any]:
        """Return the answer to a comparison.

        Args:
            comparison: What the process is asked; see :func:`math_child.compare`.
            wall_s: Seconds by the clock after which the machine, not the answer, is to blame.

        Raises:
            RuntimeError: When no process comes up, or it was killed from outside.
            TimeoutError: After ``wall_s``.
        """
        with self._free:
            try:
                answer = self._asked(comparison, wall_s)
            except _BroughtDown:
                # Was it the answer? A new process that can compare says so.
                known = self._asked({**comparison, **_KNOWN}, wall_s)
                if not known.get("right"):
                    raise RuntimeError(f"1/2 is not 0.5 here: {known}") from None
                answer = {"undecided": "it brought the process down"}
        return answer

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._end()

    def _asked(self, comparison: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        with self._lock:
            process = self.idle.pop() if self.idle else None
        process = process or _Process()
        try:
            answer = process.ask(comparison, wall_s)
        except BaseException:
            process.end()
            raise
        with self._lock:
            kept = self._end.alive and answer.get("undecided") != "memory"
            if kept:
                self.idle.append(process)
        if not kept:
            process.end()
        return answer


class _BroughtDown(Exception):
    """The process ended as one does that an answer was too much for."""


class _Process:
    """One process."""

    def __init__(self) -> None:
        here = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(math_child.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": here},
            start_new_session=True,
        )
        try:
            ready = self._read(_START_S)
            if "ready" not in ready:
                raise RuntimeError(f"mathematics cannot be compared here: {ready.get('missing')}")
        except _BroughtDown:
            self.end()
            raise RuntimeError("the process that compares mathematics does not start") from None
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def ask(self, comparison: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        """Return the answer to one comparison."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(comparison).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as e:
            raise RuntimeError("the process that compares mathematics is gone") from e
        return self._read(wall_s)

    def end(self) -> None:
        """Kill the process and let go of it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()

    def _read(self, wall_s: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out
        if not select.select([out], [], [], wall_s)[0]:
            raise TimeoutError(f"a comparison was not done within {wall_s:g} s by the clock")
        line = out.readline()
        if line.endswith(b"\n"):
            found: dict[str, Any] = json.loads(line)
            return found
        code = self._process.wait(5)
        if code in _SPENT:
            raise _BroughtDown
        raise RuntimeError(f"the process that compares mathematics ended with {code}")


def _end_all(idle: list[_Process], lock: threading.Lock) -> None:
    with lock:
        processes = list(idle)
        idle.clear()
    for process in processes:
        process.end()
