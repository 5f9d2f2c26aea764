"""How new weights reach an inference server: the base class of the transports.

Takes: tensors of a weight channel, or a broadcast. Gives: a server that has them under one tag.
Never: pauses the server (the engine does), or waits without a limit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class WeightTransport(ABC):
    """One transport of weights to a server."""

    num_ranks: int = 0
    """Number of the server's processes that can receive a broadcast of the trainer. 0: it cannot,
    and :meth:`send` never gets a :class:`Broadcast`."""

    @abstractmethod
    def prepare(
        self, tensors: Iterable[tuple[str, torch.Tensor]], files: Sequence[Path] | None = None
    ) -> Any:
        """Do the work that is possible during generation; runs in a thread.

        Args:
            tensors: The tensors, which are checked as they are read.
            files: Files of a weight channel with exactly these tensors, which the server can read.

        Raises:
            InferenceFailure: If this machine cannot prepare the weights.
            Exception: Any error that ``tensors`` raises. All prepared data is then removed.
        """

    @abstractmethod
    async def send(self, ready: Any, tag: str, *, keep_kv: bool) -> None:
        """Load these weights into a paused server, under the version ``tag``.

        Args:
            ready: The result of :meth:`prepare`, or the broadcast to receive.
            tag: The server's name of these weights.
            keep_kv: Whether the KV cache stays valid.

        Raises:
            InferenceFailure: If the server rejects them.
            RuntimeError: If the broadcast fails.
        """

    async def leave(self) -> None:  # noqa: B027 - some have nothing there
        """Release the state of this engine on a server that continues to run."""

    def close(self) -> None:  # noqa: B027 - some hold nothing
        """Release all resources; can be called twice."""
