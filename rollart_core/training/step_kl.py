"""``trainer.max_kl``: the KL divergence of one update, and a smaller step if it is too large.

    KL(before || after) ~ mean over loss tokens of r - 1 - log r,  r = p_after / p_before

This is the k3 estimator (Schulman 2020, "Approximating KL Divergence"), over at most
:data:`MAX_ROWS` rows of the update, evenly spaced in canonical order. The logprobs before the step
are from the update's own forward pass; those after it are from another one without gradient.

Takes: the rows of an update and their logprobs. Gives: the KL, the same on all ranks; parameters
after the largest share of the step that the bound allows. Never: computes a gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollart_core.training.policy import Policy
from rollart_core.training.signals import of_all_ranks, signal_rows
from rollart_core.types import FloatArray, Sample

MAX_ROWS = 64
"""Maximum number of measured rows of an update."""
MAX_HALVINGS = 3
"""Maximum number of halvings of a step before the update is discarded."""


@dataclass(frozen=True, slots=True)
class BoundedStep:
    """The outcome of one step."""

    kl: float
    """KL after the applied step; if the update was discarded, after the last tried step."""
    scale: float
    """Applied share of the step: 1, 1/2, 1/4 or 1/8; 0 if none."""
    spent_s: float
    """Seconds for copies, measurements, and steps that were undone."""

    @property
    def taken(self) -> bool:
        """Whether the parameters have changed."""
        return self.scale > 0

    def metrics(self) -> dict[str, float]:
        """Return its metrics for a report."""
        return {
            "kl_after_step": self.kl,
            "step_scale": self.scale,
            "max_kl_s": self.spent_s,
            "max_kl_given_up": float(not self.taken),
        }


def bounded_step(
    step: Callable[[float], None],
    measure: Callable[[], float],
    tensors: Sequence[Tensor],
    max_kl: float,
) -> BoundedStep:
    """Take a step, halved until the KL is within a bound.

    Args:
        step: Takes a share of the step.
        measure: Returns the KL after it; it must be the same on all ranks, so that all ranks decide
            alike.
        tensors: All tensors that ``step`` changes: parameters and moments. They are copied.
        max_kl: The bound; a KL that is NaN is above it.
    """
    began = time.perf_counter()
    step_s, kl, scale = 0.0, math.nan, 1.0
    with torch.no_grad():
        before = [tensor.detach().clone() for tensor in tensors]
    for _ in range(1 + MAX_HALVINGS):
        stepped = time.perf_counter()
        step(scale)
        step_s = time.perf_counter() - stepped
        kl = measure()
        if kl <= max_kl:
            return BoundedStep(kl, scale, time.perf_counter() - began - step_s)
        with torch.no_grad():
            for tensor, kept in zip(tensors, before, strict=True):
                tensor.copy_(kept)
        scale /= 2
    return BoundedStep(kl, 0.0, time.perf_counter() - began)


class StepKL:
    """The KL between the policy before and after one update.

    Args:
        samples: The rows of the update, in canonical order; each has loss tokens.
        policy: The policy.
        budget: Maximum number of tokens per microbatch.
    """

    def __init__(self, samples: Sequence[Sample], policy: Policy, budget: int) -> None:
        chosen = np.linspace(0, len(samples) - 1, min(MAX_ROWS, len(samples))).astype(np.int64)
        self._samples = [samples[i] for i in chosen]
        self._place = {int(i): n for n, i in enumerate(chosen)}
        self._rows = [np.zeros(s.num_tokens, dtype=np.float32) for s in self._samples]
        self._policy = policy
        self._budget = budget
        self._before: list[FloatArray] | None = None

    def see(self, members: Sequence[int], samples: Sequence[Sample], logprobs: Tensor) -> None:
        """Store the logprobs of a microbatch from the update's own forward pass.

        Args:
            members: Indices of the rows in the update.
            samples: These rows.
            logprobs: ``[K]``: the logprobs of their loss tokens.
        """
        each = torch.split(logprobs.detach(), [s.num_loss_tokens for s in samples])
        for i, sample, values in zip(members, samples, each, strict=True):
            if i in self._place:
                self._rows[self._place[i]][sample.loss_mask] = values.float().cpu().numpy()

    def measure(self) -> float:
        """Return the KL of the current policy; a collective call."""
        if self._before is None:
            self._before = of_all_ranks(self._rows)
        after = signal_rows(self._policy, self._samples, self._budget)
        return k3([s.loss_mask for s in self._samples], self._before, after)


def k3(
    masks: Sequence[np.ndarray], before: Sequence[FloatArray], after: Sequence[FloatArray]
) -> float:
    """Return the mean over loss tokens of ``r - 1 - log r``; float64.

    Args:
        masks: ``[T]`` for each row: its loss tokens.
        before: ``[T]`` for each row: logprobs before the step.
        after: ``[T]`` for each row: logprobs after the step.
    """
    rows = zip(masks, before, after, strict=True)
    log_ratio = np.concatenate([a[m].astype(np.float64) - b[m] for m, b, a in rows])
    with np.errstate(over="ignore"):
        return float(np.mean(np.expm1(log_ratio) - log_ratio))
