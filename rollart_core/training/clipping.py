"""Gradient clipping: how much of a gradient is kept, by the norms of those before it.

    norm      at ``trainer.grad_clip`` alone
    quantile  AutoClip (arXiv:2007.14469): at the q-quantile of the last norms, the
              present one among them
    zscore    ZClip (arXiv:2504.02507): a norm g with z = (g - mu) / sigma > z_t is
              scaled to mu + z_t^2 sigma / z. Then, with the scaled norm g',
              mu <- a mu + (1 - a) g', and after that var <- a var + (1 - a) (g' - mu)^2.
              The first norms give mean and variance to begin with.

``grad_clip`` is the upper bound of all. If a norm is above ``skip_above`` times the threshold, the
update is skipped. The history keeps such a norm as one of just that size (``zscore``: of the
threshold), so that norms that stay large are not outliers for ever.

Takes: norms, one an update, the same on all ranks. Gives: decisions; numbers for a checkpoint.
Never: sees a gradient.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollart_core.config.trainer import NormClip, QuantileClip, Trainer, ZScoreClip

EPS = 1e-6
"""Added to the standard deviation, as ZClip does."""


@dataclass(frozen=True, slots=True)
class ClipDecision:
    """What to do with one gradient."""

    norm: float
    threshold: float
    """A larger norm is clipped."""
    max_norm: float
    """The gradient is scaled to this norm if it is larger."""
    skipped: bool = False
    """It is an outlier: no update is taken."""

    @property
    def clipped(self) -> bool:
        """Whether the gradient is scaled."""
        return self.norm > self.max_norm


class Clipping(Protocol):
    """Decides on gradients, one after another."""

    def decide(self, norm: float) -> ClipDecision:
        """Return what to do with a gradient of this finite norm, and remember the norm."""

    def state(self) -> list[float]:
        """Return what a checkpoint keeps; always equally many numbers."""

    def load_state(self, state: Sequence[float]) -> None:
        """Go on from what :meth:`state` returned."""


class FixedClipping:
    """``kind: norm``."""

    def __init__(self, grad_clip: float) -> None:
        self._grad_clip = grad_clip

    def decide(self, norm: float) -> ClipDecision:
        """Clip at ``grad_clip``."""
        return ClipDecision(norm, self._grad_clip, self._grad_clip)

    def state(self) -> list[float]:
        """Return nothing."""
        return []

    def load_state(self, state: Sequence[float]) -> None:
        """Do nothing."""


class QuantileClipping:
    """``kind: quantile``; see the module."""

    def __init__(self, config: QuantileClip, grad_clip: float) -> None:
        self._config = config
        self._grad_clip = grad_clip
        self._norms: deque[float] = deque(maxlen=config.window)
        self._num_seen = 0

    def decide(self, norm: float) -> ClipDecision:
        """Clip at the quantile of the last norms."""
        in_warmup = self._num_seen < self._config.warmup_updates
        self._norms.append(norm)
        self._num_seen += 1
        if in_warmup:
            return ClipDecision(norm, self._grad_clip, self._grad_clip)
        quantile = float(np.quantile(self._norms, self._config.quantile))
        limit = _skip_limit(quantile, self._config.skip_above)
        if norm > limit:
            self._norms[-1] = limit
        bound = min(quantile, self._grad_clip)
        return ClipDecision(norm, bound, bound, skipped=norm > limit)

    def state(self) -> list[float]:
        """Return how many norms were seen, and the last of them, filled up with zeros."""
        missing = self._config.window - len(self._norms)
        return [float(self._num_seen), *self._norms, *([0.0] * missing)]

    def load_state(self, state: Sequence[float]) -> None:
        """Go on from what :meth:`state` returned."""
        self._num_seen = int(state[0])
        last = state[1 : 1 + min(self._num_seen, self._config.window)]
        self._norms = deque(last, maxlen=self._config.window)


class ZScoreClipping:
    """``kind: zscore``; see the module."""

    def __init__(self, config: ZScoreClip, grad_clip: float) -> None:
        self._config = config
        self._grad_clip = grad_clip
        self._num_seen = 0
        self._mean = 0.0
        self._variance = 0.0

    def decide(self, norm: float) -> ClipDecision:
        """Clip an outlier."""
        config = self._config
        if self._num_seen < config.warmup_updates:
            self._add_to_first(norm)
            return ClipDecision(norm, self._grad_clip, self._grad_clip)
        deviation = math.sqrt(self._variance)
        threshold = self._mean + config.z_threshold * deviation
        z = (norm - self._mean) / (deviation + EPS)
        kept = norm
        if z > config.z_threshold:
            kept = self._mean + config.z_threshold**2 * deviation / z
        skipped = norm > _skip_limit(threshold, config.skip_above)
        self._remember(threshold if skipped else kept)
        grad_clip = self._grad_clip
        return ClipDecision(norm, min(threshold, grad_clip), min(kept, grad_clip), skipped=skipped)

    def state(self) -> list[float]:
        """Return how many norms were seen, their mean and variance."""
        return [float(self._num_seen), self._mean, self._variance]

    def load_state(self, state: Sequence[float]) -> None:
        """Go on from what :meth:`state` returned."""
        self._num_seen, self._mean, self._variance = int(state[0]), state[1], state[2]

    def _add_to_first(self, norm: float) -> None:
        """Update mean and variance of all norms so far (Welford 1962)."""
        self._num_seen += 1
        before = self._mean
        self._mean += (norm - before) / self._num_seen
        gained = (norm - before) * (norm - self._mean) - self._variance
        self._variance += gained / self._num_seen

    def _remember(self, norm: float) -> None:
        """Update the moving mean, and with it the moving variance."""
        decay = self._config.ema_decay
        self._num_seen += 1
        self._mean = decay * self._mean + (1 - decay) * norm
        self._variance = decay * self._variance + (1 - decay) * (norm - self._mean) ** 2


def make_clipping(config: Trainer) -> Clipping:
    """Return the clipping that a ``trainer`` section asks for, without any history."""
    match config.clip:
        case QuantileClip() as clip:
            return QuantileClipping(clip, config.grad_clip)
        case ZScoreClip() as clip:
            return ZScoreClipping(clip, config.grad_clip)
        case NormClip():
            return FixedClipping(config.grad_clip)


def _skip_limit(threshold: float, skip_above: float | None) -> float:
    return math.inf if skip_above is None else skip_above * threshold
