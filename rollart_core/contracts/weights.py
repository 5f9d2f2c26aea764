"""Weight channels: how a published policy version travels from trainer to engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollart_core.contracts.spec import PluginSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChannelSpec(PluginSpec):
    """What a weight channel says of itself."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What one publication cost."""

    policy_version: int
    num_bytes: int
    publish_s: float


class WeightChannel(ABC):
    """One end of a channel. Both ends are opened with the same ``location`` (a folder or address).

    The newest ``keep`` versions can be fetched; older ones are gone.
    """

    @abstractmethod
    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Publication:
        """Make a version fetchable; atomically, so that a reader never sees half of it."""

    @abstractmethod
    def fetch(self, policy_version: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the tensors of a version, in the order published, on the CPU.

        Raises:
            LookupError: When the channel does not hold that version.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what this end holds (the publisher's end: everything); may be called twice."""
