"""Weight channels: transfer published policy versions from the trainer to the engines.

Takes: nothing. Gives: the base class of channels, their spec, the cost of a publication. Never:
imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollart_core.contracts.spec import PluginSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChannelSpec(PluginSpec):
    """The spec of a weight channel."""

    reach: Literal["machine", "folder", "network"] = "folder"
    """Maximum distance of its ends. ``machine``: on one machine. ``folder``: both ends can access
    one folder. ``network``: one end can connect to the other."""


@dataclass(frozen=True, slots=True)
class Publication:
    """The cost of one publication."""

    policy_version: int
    num_bytes: int
    """Bytes of the tensors."""
    publish_s: float
    moved_bytes: int | None = None
    """Bytes that the channel transfers for them. None means ``num_bytes``."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A broadcast from the trainer, which the processes of an inference server receive.

    They join a process group as torch's ``init_process_group`` does, and receive one block of bytes
    per bucket: its tensors one after the other, without gaps.
    """

    policy_version: int
    group: str
    """Name of the process group. The group of an earlier broadcast is used again."""
    host: str
    port: int
    """Address of the group's store."""
    backend: str
    first_rank: int
    """The ranks of the server are consecutive. The trainer has rank 0."""
    num_ranks: int
    """Size of the group."""
    buckets: Sequence[Sequence[tuple[str, str, tuple[int, ...]]]]
    """Name, dtype and shape of the tensors in each block."""
    rest: Callable[[int], Iterable[tuple[str, torch.Tensor]]]
    """Returns the tensors from a bucket on, over a connection of this process. Raises as
    :meth:`WeightChannel.fetch`."""


class WeightChannel(ABC):
    """One end of a channel. Both ends are opened with the same ``location`` (a folder or address).

    The newest ``keep`` versions can be fetched. Older versions are gone. Versions higher than the
    last published one are also gone, after the trainer went back to a checkpoint.
    """

    moved_bytes: int = 0
    """Bytes sent and received by this end so far. 0 if it does not count them."""

    @abstractmethod
    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Publication:
        """Publish a version atomically, so that a reader never sees a part of it.

        ``tensors`` may be a generator, as in a sharded trainer. A channel consumes it in order and
        holds as few tensors at a time as possible.
        """

    @abstractmethod
    def fetch(self, policy_version: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the tensors of a version, in the order published.

        Raises:
            LookupError: If the channel does not have that version. Raised immediately, or by the
                iterator if the version is removed meanwhile.
            ValueError: By the iterator, if the stored data are damaged.
            TimeoutError: If the other end does not answer in time.
        """

    def files(self, policy_version: int) -> Sequence[Path] | None:
        """Return the safetensors files of a version, if the channel consists of such files.

        An inference server on this machine can load them without another copy. They contain the
        published names. A hard link keeps a file after the channel has removed the version.

        Raises:
            LookupError: If the channel does not have that version.
        """
        return None

    def broadcast(self, policy_version: int, num_ranks: int) -> Broadcast | None:
        """Request a broadcast to ``num_ranks`` processes, if the channel can broadcast.

        It begins when all ranks have joined. If a member ends, the others receive an error, and
        fetch the rest.

        Raises:
            LookupError: If the channel does not have that version.
            TimeoutError: If the other end does not answer in time.
        """
        return None

    def newest(self) -> int | None:
        """Return the last published version. None if there is none, or it is unknown."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this end (of the publisher: everything). May be called twice."""
