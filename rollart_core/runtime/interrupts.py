"""Signals: stop everything that a run, an evaluation or a benchmark has started.

    SIGINT              interrupted: a user stops it
    SIGTERM, SIGUSR1    preempted: a cluster stops it and may start it again

Takes: a function that may start an orderly shutdown. Gives: context managers. Never: treats a
cancellation by the caller as a Ctrl-C, or handles signals outside the main thread.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

INTERRUPTED: Final = "interrupted"
PREEMPTED: Final = "preempted"
REASONS: Final = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
}
"""Signal -> the reason of a stop. Slurm sends SIGUSR1 if asked to, Kubernetes SIGTERM."""
EXIT_CODES: Final = {INTERRUPTED: 130, PREEMPTED: os.EX_TEMPFAIL}
"""Reason -> exit code: as shells report Ctrl-C, and 75, "try again" in sysexits.h."""
STOP_HINTS: Final = {
    INTERRUPTED: "Press Ctrl-C again to stop now.",
    PREEMPTED: "The run is preempted: only a checkpoint is written.",
}
"""Reason -> what follows the message that the current batch is finished."""


def at_once(reason: str) -> bool:
    """Return False: there is no orderly shutdown."""
    return False


@contextmanager
def interrupts(ends_in_order: Callable[[str], bool] = at_once) -> Iterator[None]:
    """Cancel the current task at each signal, unless an orderly shutdown is started.

    Args:
        ends_in_order: Called at each signal with the reason. If it returns True, the task ends
            without being cancelled.

    Raises:
        KeyboardInterrupt: If a signal ended the task.
        SystemExit: If this signal was not SIGINT, with its exit code.
    """
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    ended_by: list[str] = []

    def interrupt(reason: str) -> None:
        if not ends_in_order(reason):
            ended_by.append(reason)
            main.cancel()

    taken: list[signal.Signals] = []
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not main thread, or no support
        for number, reason in REASONS.items():
            loop.add_signal_handler(number, interrupt, reason)
            taken.append(number)
    try:
        yield
    except asyncio.CancelledError:
        if not ended_by:  # the caller cancelled
            raise
        if PREEMPTED in ended_by:
            raise SystemExit(EXIT_CODES[PREEMPTED]) from None
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
