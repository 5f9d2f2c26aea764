"""Tasks of asyncio that run in the background.

Takes: tasks. Gives: references that last until the tasks end, and one way to end them. Never:
starts a task.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

_Task = TypeVar("_Task", bound="asyncio.Task[Any]")


def keep_until_done(task: _Task, among: set[_Task]) -> _Task:
    """Add a task to a set until it ends: an event loop has only a weak reference to it."""
    among.add(task)
    task.add_done_callback(among.discard)
    return task


async def cancel_and_wait(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended. Their errors and None are ignored."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
