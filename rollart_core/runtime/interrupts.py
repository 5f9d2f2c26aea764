"""Ctrl-C and SIGTERM: stop everything that a run, an evaluation or a benchmark has started.

Takes: a function that may start an orderly shutdown. Gives: context managers. Never: treats a
cancellation by the caller as a Ctrl-C, or handles signals outside the main thread.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def at_once() -> bool:
    """Return False: there is no orderly shutdown."""
    return False


@contextmanager
def interrupts(ends_in_order: Callable[[], bool] = at_once) -> Iterator[None]:
    """Cancel the current task at each signal, unless an orderly shutdown is started.

    Args:
        ends_in_order: Called at each signal. If it returns True, the task ends without being
            cancelled.

    Raises:
        KeyboardInterrupt: If a signal ended the task.
    """
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    was_told = False

    def interrupt() -> None:
        nonlocal was_told
        if not ends_in_order():
            was_told = True
            main.cancel()

    taken: list[signal.Signals] = []
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not main thread, or no support
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
            taken.append(number)
    try:
        yield
    except asyncio.CancelledError:
        if not was_told:  # the caller cancelled
            raise
        raise KeyboardInterrupt from None
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Make SIGTERM end the block as Ctrl-C does, so that it cleans up.

    Has no effect outside the main thread.

    Raises:
        KeyboardInterrupt: At SIGTERM.
    """

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
