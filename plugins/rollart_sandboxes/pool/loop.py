"""The event loop on which all boxes of a process live, in a thread of its own.

Takes: coroutines, from any thread or loop. Gives: their results. Never: runs blocking code.

A box outlives the call that opened it, and a loop that a caller brings may end before the box does:
so boxes have a loop that ends with the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_pid = 0


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the boxes' loop; cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(work, _running())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the boxes' loop and wait for it; not from that loop itself."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that runs on the boxes' loop, from any loop."""
    return await asyncio.wrap_future(submit(work))


def _running() -> asyncio.AbstractEventLoop:
    global _loop, _pid
    with _lock:
        if _loop is None or _pid != os.getpid():  # a fork has the object but not the thread
            _loop, _pid = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="boxes", daemon=True).start()
        return _loop
