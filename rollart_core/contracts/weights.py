"""Weight channels: how a published policy version travels from trainer to engines.

Takes: nothing. Gives: the base of channels, their spec, what a publication cost. Never: imports
torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollart_core.contracts.spec import PluginSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChannelSpec(PluginSpec):
    """What a weight channel says of itself."""

    reach: Literal["machine", "folder", "network"] = "folder"
    """How far apart its ends may be: on one machine, wherever both see one folder, or wherever one
    can connect to the other."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What one publication cost."""

    policy_version: int
    num_bytes: int
    """Of the tensors."""
    publish_s: float
    moved_bytes: int | None = None
    """What the channel carries for them; None: as many as ``num_bytes``."""


class WeightChannel(ABC):
    """One end of a channel. Both ends are opened with the same ``location`` (a folder or address).

    The newest ``keep`` versions can be fetched; older ones are gone, and so are higher ones than
    the one published last (of a trainer that was taken back to a checkpoint).
    """

    moved_bytes: int = 0
    """Bytes that have come or gone through this end so far; 0 where it does not count."""

    @abstractmethod
    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Publication:
        """Make a version fetchable; atomically, so that a reader never sees half of it.

        ``tensors`` may be made one by one, as those of a sharded trainer are: a channel takes them
        in turn and does not hold more of them at once than it must.
        """

    @abstractmethod
    def fetch(self, policy_version: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the tensors of a version, in the order published.

        Raises:
            LookupError: When the channel does not hold that version, at once or, where it is gone
                meanwhile, from the iterator.
            ValueError: From the iterator: when what is held is damaged.
            TimeoutError: When the other end does not answer in time.
        """

    def newest(self) -> int | None:
        """Return the version published last; None when there is none, or it cannot be said."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free what this end holds (the publisher's end: everything); may be called twice."""
