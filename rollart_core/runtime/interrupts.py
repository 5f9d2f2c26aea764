"""Ctrl-C and SIGTERM: what a run, an evaluation or a benchmark started is taken down again.

Takes: who may see to an end in order. Gives: context managers. Never: takes another's cancelling
for a Ctrl-C, or a signal where it is not the main thread's to take.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def at_once() -> bool:
    """Say that nobody sees to an end in order."""
    return False


@contextmanager
def interrupts(ends_in_order: Callable[[], bool] = at_once) -> Iterator[None]:
    """Have each signal end the current task, unless somebody ends it in order.

    Args:
        ends_in_order: Asked at each signal. True: the task comes to its end by itself.

    Raises:
        KeyboardInterrupt: When a signal ended the task.
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
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not the main thread, or none
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
            taken.append(number)
    try:
        yield
    except asyncio.CancelledError:
        if not was_told:  # it is the caller who cancels
            raise
        raise KeyboardInterrupt from None
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Have SIGTERM end what is inside as a Ctrl-C does, so that it cleans up; not of a thread.

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
