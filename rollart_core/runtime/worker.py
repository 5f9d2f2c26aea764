"""One part of a run that executes somewhere else: what its owner can ask of it.

Takes: ``"module:function"`` that builds an object, and arguments that pickle. Gives: calls on that
object. Never: says where it executes; a process of this machine and an actor of a cluster have the
same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Worker(Protocol):
    """An engine, a trainer rank, an env worker, ... in a process of its own."""

    name: str
    """What errors and the log call it."""
    on_death: Callable[[Any], None] | None
    """Called once, with the part, when it is gone without having been closed."""

    @property
    def alive(self) -> bool:
        """True while it can be called."""

    async def start(
        self, factory: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Bring it up and build the object in it."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object (or ``"module:function"``) and wait for its answer.

        Raises:
            WorkerDied: When the part is gone, before or meanwhile.
            Exception: Whatever the method raised.
        """

    async def close(self, *, grace_s: float = 5.0) -> None:
        """End it, by force after ``grace_s``; may be called twice."""

    def kill(self) -> None:
        """End it by force now, as if it had died: ``on_death`` hears of it."""
