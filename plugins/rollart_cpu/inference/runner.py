"""The interface between an engine and a model: tokens at (slot, position) in, logits out.

Takes: batches of segments. Gives: logits of the rows asked for, keeping keys and values per slot.
Never: schedules, samples or handles requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class TokenBatch:
    """``S`` segments of consecutive tokens, packed to ``N`` rows without padding.

    Segments of one slot must not appear twice. Rows see the keys of their own slot up to and with
    themselves.
    """

    token_ids: Int64Array
    """``[N]``."""
    slots: Int64Array
    """``[S]``; which row of the cache."""
    starts: Int64Array
    """``[S]``; position of the first token."""
    lengths: Int64Array
    """``[S]``; at least 1."""
    wanted: Int64Array
    """``[R]``; segments whose last row's logits are wanted, ascending."""
    every_row: bool = field(default=False, kw_only=True)
    """The logits of all ``N`` rows are wanted; ``wanted`` does not count then."""

    @property
    def num_tokens(self) -> int:
        """``N``."""
        return len(self.token_ids)


class Runner(ABC):
    """A model with a cache of ``num_slots`` rows of ``max_tokens`` positions."""

    vocab_size: int
    num_slots: int
    max_tokens: int
    max_batch_tokens: int
    """Most rows of one batch."""
    is_native: bool = False
    """True when logits lie on the CPU and the native sampler may read them."""

    @abstractmethod
    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Compute a batch.

        Returns:
            ``[R, vocab]`` float32, good until the next call.
        """

    @abstractmethod
    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first keys and values of slot ``source`` to slot ``target``."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Clear a slot that may hold non-finite values; do nothing if masks suffice."""

    @abstractmethod
    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Write weights to a second set, while the first stays in use, and return their bytes.

        For any one thread at a time, while another calls :meth:`forward`. Tensors are taken one by
        one. The second set is allocated at the first call and kept.

        Args:
            tensors: As for :meth:`load`.

        Raises:
            ValueError: As :meth:`load`; the weights in use stay as they are.
        """

    @abstractmethod
    def swap(self) -> None:
        """Use the weights that :meth:`stage` has written, between two calls of :meth:`forward`."""

    @abstractmethod
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Overwrite the weights in place and return their bytes.

        Args:
            tensors: Hugging Face names; a tied output matrix may be left out.

        Raises:
            ValueError: If a tensor is unknown, missing, or of another shape.
        """
