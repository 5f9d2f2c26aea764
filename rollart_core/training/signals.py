"""Signals: additional values for each token that an algorithm requires.

Takes: samples, and the policies that compute signals. Gives: ``[T]`` rows, computed at their first
use. Never: gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from rollart_core.errors import BatchRefused, ConfigError
from rollart_core.training import distributed
from rollart_core.training.policy import Policy
from rollart_core.types import FloatArray, Sample

KNOWN = frozenset({"proximal_logprobs", "ref_logprobs", "entropy"})
TEACHER = "teacher_logprobs"
"""Logprobs by a teacher's engine; they come with the samples."""


def check_known(
    requires: frozenset[str], modules: frozenset[str] = frozenset(), *, has_teacher: bool = False
) -> None:
    """Check that all required signals can be computed.

    Args:
        requires: The signals that the algorithm requires.
        modules: The names of its extra modules.
        has_teacher: Whether the run has a teacher.

    Raises:
        ConfigError: If a signal or a module does not fit; the error names it.
    """
    if TEACHER in requires and not has_teacher:
        raise ConfigError(
            f"the algorithm requires {TEACHER}: set teacher.path to the model to learn from"
        )
    known = KNOWN | modules | {TEACHER}
    if unknown := sorted(requires - known):
        raise ConfigError(
            f"the algorithm requires {', '.join(unknown)}; this trainer computes {sorted(KNOWN)}, "
            "and the signals of extra modules with that name (extra_modules())"
        )
    if taken := sorted(modules & (KNOWN | {TEACHER})):
        raise ConfigError(f"the algorithm's modules {', '.join(taken)} have names of other signals")
    if idle := sorted(modules - requires):
        raise ConfigError(
            f"the algorithm has modules {', '.join(idle)} that are not among its required signals"
        )


def teacher_rows(samples: Sequence[Sample]) -> list[FloatArray]:
    """Return the teacher's logprobs of samples.

    Raises:
        BatchRefused: If it has not scored all of them.
    """
    missing = sum(TEACHER not in s.signals for s in samples if s.num_loss_tokens)
    if missing:
        raise BatchRefused(f"{missing} of {len(samples)} samples have no {TEACHER}")
    nothing = np.zeros(0, dtype=np.float32)
    return [s.signals.get(TEACHER, np.resize(nothing, s.num_tokens)) for s in samples]


class LazySignals(Mapping[str, list[FloatArray]]):
    """Signals by name, each computed at its first use.

    Args:
        names: The names of the signals.
        compute: Returns one ``[T]`` row per sample for a name.
    """

    def __init__(self, names: frozenset[str], compute: Callable[[str], list[FloatArray]]) -> None:
        self._names = sorted(names)
        self._compute = compute
        self._rows: dict[str, list[FloatArray]] = {}

    def known(self, name: str) -> list[FloatArray] | None:
        """Return the rows if they have been computed."""
        return self._rows.get(name)

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
    """Return one ``[T]`` row per sample: logprobs (or entropies) of its loss tokens, 0 elsewhere.

    Args:
        policy: The policy.
        samples: The samples; some may have no loss tokens.
        budget: Maximum number of tokens per microbatch.
        entropy: Whether to return entropies instead of logprobs.
    """
    which = 1 if entropy else 0

    def compute(chosen: Sequence[Sample]) -> torch.Tensor:
        with torch.no_grad():
            return policy.logprobs(chosen)[which]

    rows = computed_rows(compute, policy.microbatches, samples, budget)
    distributed.reshard(policy.model)
    return rows


def computed_rows(
    compute: Callable[[Sequence[Sample]], torch.Tensor],
    microbatches: Callable[[Sequence[Sample], int, int], list[list[int]]],
    samples: Sequence[Sample],
    budget: int,
) -> list[FloatArray]:
    """Return one ``[T]`` row per sample on all ranks; each rank computes its share.

    Args:
        compute: Returns the values ``[K]`` of the samples' loss tokens.
        microbatches: Returns bins of samples, from samples, token budget and number of ranks.
        samples: The samples; some may have no loss tokens.
        budget: Maximum number of tokens per microbatch.
    """
    rows = [np.zeros(s.num_tokens, dtype=np.float32) for s in samples]
    asked = [i for i, s in enumerate(samples) if s.num_loss_tokens]
    bins = microbatches([samples[i] for i in asked], budget, distributed.world_size())
    for members, is_real in distributed.share(bins):
        chosen = [asked[m] for m in members]
        values = compute([samples[i] for i in chosen])
        if is_real:
            _fill(rows, samples, chosen, values.cpu().numpy())
    return of_all_ranks(rows)


def _fill(
    rows: list[FloatArray], samples: Sequence[Sample], chosen: Sequence[int], flat: FloatArray
) -> None:
    """Write the values ``[K]`` of some samples' loss tokens to their rows."""
    start = 0
    for i in chosen:
        stop = start + samples[i].num_loss_tokens
        rows[i][samples[i].loss_mask] = flat[start:stop]
        start = stop


def of_all_ranks(rows: list[FloatArray]) -> list[FloatArray]:
    """Return the rows of all ranks; rows that a rank has not filled are 0, so a sum is exact."""
    if distributed.world_size() == 1 or not rows:
        return rows
    flat = distributed.all_sum(torch.from_numpy(np.concatenate(rows))).numpy()
    return np.split(flat, np.cumsum([len(r) for r in rows])[:-1])
