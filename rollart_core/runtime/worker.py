"""The interface of a worker: one object of a run that lives in another process.

Takes: ``"module:function"`` that builds an object, and picklable arguments. Gives: calls on that
object. Never: exposes where it executes. A process on this machine and an actor of a cluster have
the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Worker(Protocol):
    """An engine, a trainer rank, an env worker or another object in its own process."""

    name: str
    """The name used in errors and the log."""
    on_death: Callable[[Any], None] | None
    """Called once, with the worker, if its process ends without ``close``."""

    @property
    def alive(self) -> bool:
        """True while the worker accepts calls."""

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the process and build the object in it."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object (or ``"module:function"``) and wait for the result.

        Raises:
            WorkerDied: If the process has ended, before the call or during it.
            Exception: Any exception that the method raised.
        """

    async def close(self, *, grace_s: float = 5.0) -> None:
        """End the process, and kill it after ``grace_s`` seconds; may be called twice."""

    def kill(self) -> None:
        """Kill the process now; ``on_death`` is called as for a crash."""
