"""Signals: what an algorithm wants to know of each token besides who sampled it.

Takes: samples, and the policies that can speak of them. Gives: ``[T]`` rows, computed when asked
for. Never: gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from rollart_core.errors import ConfigError
from rollart_core.train import distributed
from rollart_core.train.policy import Policy
from rollart_core.types import FloatArray, Sample

KNOWN = frozenset({"proximal_logprobs", "ref_logprobs", "entropy"})


def check_known(requires: frozenset[str]) -> None:
    """Refuse signals that this trainer cannot compute.

    Raises:
        ConfigError: Naming them.
    """
    unknown = sorted(requires - KNOWN)
    if unknown:
        raise ConfigError(
            f"the algorithm requires {', '.join(unknown)}; this trainer computes {sorted(KNOWN)}"
        )


class LazySignals(Mapping[str, list[FloatArray]]):
    """Signals by name, each computed at its first use.

    Args:
        names: Those that exist.
        compute: From a name to one ``[T]`` row a sample.
    """

    def __init__(self, names: frozenset[str], compute: Callable[[str], list[FloatArray]]) -> None:
        self._names = sorted(names)
        self._compute = compute
        self._rows: dict[str, list[FloatArray]] = {}

    def __getitem__(self, name: str) -> list[FloatArray]:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._rows:
            self._rows[name] = self._compute(name)
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def signal_rows(
    policy: Policy, samples: Sequence[Sample], budget: int, *, entropy: bool = False
) -> list[FloatArray]:
    """Return one ``[T]`` row a sample: logprobs (or entropies) of its loss tokens, 0 elsewhere.

    Args:
        policy: Whose.
        samples: May include ones without loss tokens.
        budget: Most tokens a microbatch.
        entropy: Entropies instead of logprobs.
    """
    rows = [np.zeros(s.num_tokens, dtype=np.float32) for s in samples]
    asked = [i for i, s in enumerate(samples) if s.num_loss_tokens]
    bins = policy.microbatches([samples[i] for i in asked], budget, distributed.world_size())
    for members, is_real in distributed.share(bins):
        chosen = [asked[m] for m in members]
        with torch.no_grad():
            values = policy.logprobs([samples[i] for i in chosen])[1 if entropy else 0]
        if is_real:
            _fill(rows, samples, chosen, values.cpu().numpy())
    distributed.reshard(policy.model)
    return _of_all_ranks(rows)


def _fill(
    rows: list[FloatArray], samples: Sequence[Sample], chosen: Sequence[int], flat: FloatArray
) -> None:
    """Put the values ``[K]`` of some samples' loss tokens into their rows."""
    start = 0
    for i in chosen:
        stop = start + samples[i].num_loss_tokens
        rows[i][samples[i].loss_mask] = flat[start:stop]
        start = stop


def _of_all_ranks(rows: list[FloatArray]) -> list[FloatArray]:
    """Return rows of which each rank has filled some; the others' are 0, so a sum is exact."""
    if distributed.world_size() == 1 or not rows:
        return rows
    flat = distributed.all_sum(torch.from_numpy(np.concatenate(rows))).numpy()
    return np.split(flat, np.cumsum([len(r) for r in rows])[:-1])
