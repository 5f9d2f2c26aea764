"""What every process that holds a part does with it: build it, and run calls on it.

Takes: names of methods and their arguments. Gives: what they return. Never: lets a long call hold
up another: coroutines run on the loop, all else on one thread beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollart_core.errors import RollartError, contained, described
from rollart_core.rollout.loop import run_exit_functions

_PR_SET_PDEATHSIG = 1


class WorkerHost:
    """Holds a part."""

    def __init__(self) -> None:
        self.part: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="part")

    async def run(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a method of the part, or ``"module:function"``.

        Raises:
            Exception: Whatever it raised.
        """
        function = self._find(name)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _contained, function, args, kwargs)

    def _find(self, name: str) -> Any:
        if name == "__build__":
            return self._build
        if name == "__ping__":
            return _pong
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(importlib.import_module(module), attribute)
        return getattr(self.part, name)

    def _build(self, factory: str, kwargs: dict[str, Any]) -> None:
        self.part = self._find(factory)(**kwargs)


def _contained(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on the thread of the part; no error of it ends that thread or the loop."""
    try:
        return function(*args, **kwargs)
    except BaseException as e:
        raise contained(e) from e


async def _pong() -> None:
    """Say that the loop of this process runs."""


def portable(error: BaseException) -> Exception:
    """Return the error if it survives the journey, else a plain one that says the same."""
    try:
        if isinstance(error, Exception):
            again = pickle.loads(pickle.dumps(error))
            if type(again) is type(error) and isinstance(str(again), str):
                return error
    except BaseException:  # whatever its methods raise, the caller gets an answer
        pass
    return RollartError(described(error))


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process with its parent (elsewhere the end of its stream does)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def leave() -> None:
    """Close what this process has open, before it ends without atexit."""
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
