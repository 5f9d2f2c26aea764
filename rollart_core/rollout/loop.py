"""The event loop of what outlives a call: sandboxes and MCP servers, in a thread of its own.

Takes: coroutines, from any thread or loop. Gives: their results. Never: runs blocking code.

A sandbox outlives the call that opened it, and a loop that a caller brings may end before the
sandbox does: so this loop ends with the process. :func:`at_exit` says what is closed then.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_pid = 0
_at_exit: list[Callable[[], None]] = []


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the background loop; cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(work, _running())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait for it; not from that loop itself."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that runs on the background loop, from any loop."""
    return await asyncio.wrap_future(submit(work))


def at_exit(close: Callable[[], None]) -> None:
    """Call a function when the process ends: also a worker, which ends without ``atexit``."""
    if not _at_exit:
        atexit.register(run_exit_functions)
    if close not in _at_exit:
        _at_exit.append(close)


def run_exit_functions() -> None:
    """Call what was given to :func:`at_exit`, each once; what one raises is dropped."""
    while _at_exit:
        with suppress(Exception):
            _at_exit.pop()()


def _running() -> asyncio.AbstractEventLoop:
    global _loop, _pid
    with _lock:
        if _loop is None or _pid != os.getpid():  # a fork has the object but not the thread
            _loop, _pid = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="background", daemon=True).start()
        return _loop
