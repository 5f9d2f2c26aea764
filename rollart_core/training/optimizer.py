"""AdamW with a schedule, clipped gradients, a bounded step, and a guard against bad numbers.

    gradients -> norm -> not finite, or an outlier (trainer.clip): no update
                      -> clip -> AdamW at lr * schedule -> KL above max_kl: undo, half the step

Takes: parameters that hold gradients. Gives: one update, or none and why; several in a row whose
loss or gradient is not finite are an error. Never: computes a loss.

**Schedule**, the factor of ``trainer.lr`` at each update:

    warm-up (linear, W updates)  *  decay at the place p in [0, 1] of the schedule

    linear   1 - (1 - m) p
    cosine   m + (1 - m) (1 + cos(pi p)) / 2             arXiv:1608.03983, equation 5, one period
    wsd      1 until p = 1 - d, then linear down to m    arXiv:2404.06395

with m ``min_ratio`` and d ``decay_share``. Over updates p is ``(s - W) / (N - W)``, s the updates
taken so far and N ``num_train_steps``; over ``stop`` it is the share of ``stop`` that is used. It
depends on nothing else, so that a run resumed from a checkpoint has the same learning rates.

**Clipping**, how much of a gradient is kept, by the norms of those before it:

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
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.config.training import NormClip, QuantileClip, Schedule, Trainer, ZScoreClip
from rollart_core.errors import TrainingDiverged
from rollart_core.training import distributed
from rollart_core.training.step_kl import BoundedStep, bounded_step

MAX_SKIPPED = 3
"""So many updates in a row without a finite loss and gradient end the run."""

NORM_EPS = 1e-6
"""Added to the standard deviation, as ZClip does."""


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What became of one update."""

    grad_norm: float
    """Before clipping."""
    lr: float
    updated: bool
    clip: ClipDecision | None = None
    """None when loss or gradient were not finite."""
    step: BoundedStep | None = None
    """None when the KL of the step was not measured."""

    def metrics(self) -> dict[str, float]:
        """Return what a report says of it."""
        found = {
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "updated": float(self.updated),
            "not_finite": float(self.clip is None),
            "skipped": float(self.clip is not None and self.clip.skipped),
        }
        if self.clip is not None:
            found["clipped"] = float(self.clip.clipped)
            found["clip_threshold"] = self.clip.threshold
        return {**found, **(self.step.metrics() if self.step else {})}


class GuardedAdamW:
    """AdamW over named parameters (arXiv:1711.05101, algorithm 2).

    Args:
        parameters: Name -> parameter; matrices decay, vectors do not.
        config: Learning rate, warm-up, schedule, clipping, betas and so on.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: TrainerConfig) -> None:
        self._config = config
        self._parameters = parameters
        self._skipped = 0
        self.train_step = 0
        """Updates taken so far."""
        self.clipping = make_clipping(config)
        self.lr_factor = 1.0
        """What the configured learning rate is multiplied by."""
        every = list(parameters.values())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in every if p.dim() > 1]},
            {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def update(
        self,
        loss: float,
        lr: float | None = None,
        *,
        progress: float | None = None,
        holds: bool = False,
        measure_kl: Callable[[], float] | None = None,
    ) -> UpdateOutcome:
        """Clip, check, and update with the gradients the parameters hold.

        Args:
            loss: The loss those gradients are of.
            lr: Learning rate; None for the configured one with its warm-up and schedule.
            progress: The used share of ``stop``, for a schedule over it.
            holds: Leave the parameters as they are: the train step counts all the same.
            measure_kl: Returns how far the parameters now are from those before; needs ``max_kl``.

        Raises:
            TrainingDiverged: At the third update in a row that is not finite.
        """
        lr = self._lr(progress) if lr is None else lr
        parameters = list(self._parameters.values())
        norms = distributed.gradient_norm(parameters)
        norm = float(distributed.whole(norms))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip(loss, norm)
            return UpdateOutcome(norm, lr, updated=False)
        self._skipped = 0
        clip = self.clipping.decide(norm)
        if clip.skipped:
            return UpdateOutcome(norm, lr, updated=False, clip=clip)
        distributed.scale_gradients(parameters, clip.max_norm, norms)
        step = None if holds else self._take(lr, measure_kl)
        updated = step is None or step.taken
        self.train_step += updated
        return UpdateOutcome(norm, lr, updated=updated, clip=clip, step=step)

    def go_on_from(self, train_step: int) -> None:
        """Go on from a checkpoint that was loaded."""
        self.train_step = train_step
        self._skipped = 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments and step counts by parameter name; to be saved, or loaded into."""
        for p in self._parameters.values():
            if not self._adamw.state[p]:
                self._adamw.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return {name: dict(self._adamw.state[p]) for name, p in self._parameters.items()}

    def _lr(self, progress: float | None) -> float:
        config = self._config
        scheduled = lr_factor(config.schedule, config.warmup_train_steps, self.train_step, progress)
        return config.lr * scheduled * self.lr_factor

    def _take(self, lr: float, measure_kl: Callable[[], float] | None) -> BoundedStep | None:
        """Take the step; with ``measure_kl``, only as much of it as ``max_kl`` allows."""

        def step(scale: float) -> None:
            for group in self._adamw.param_groups:
                group["lr"] = lr * scale
            self._adamw.step()

        if measure_kl is None:
            step(1.0)
            return None
        assert self._config.max_kl is not None
        moments = [tensor for of_one in self.state().values() for tensor in of_one.values()]
        tensors = [*self._parameters.values(), *moments]
        return bounded_step(step, measure_kl, tensors, self._config.max_kl)

    def _skip(self, loss: float, norm: float) -> None:
        self._skipped += 1
        if self._skipped >= MAX_SKIPPED:
            raise TrainingDiverged(
                f"{self._skipped} updates in a row were not finite (loss {loss}, gradient norm "
                f"{norm}) after train_step {self.train_step}: lower trainer.lr (it is "
                f"{self._config.lr}) or trainer.grad_clip, or look at the rewards"
            )


def lr_factor(
    schedule: Schedule, warmup_train_steps: int, train_step: int, progress: float | None
) -> float:
    """Return what ``trainer.lr`` is multiplied by at the next update.

    Args:
        schedule: The section; over updates, with ``num_train_steps`` known.
        warmup_train_steps: W.
        train_step: Updates taken so far.
        progress: The used share of ``stop``, where the schedule is over it.

    Raises:
        ValueError: When the schedule needs what was not given.
    """
    warmup = min(1.0, (train_step + 1) / max(1, warmup_train_steps))
    if schedule.kind == "constant":
        return warmup
    return warmup * _decay(schedule, _place(schedule, warmup_train_steps, train_step, progress))


def _place(
    schedule: Schedule, warmup_train_steps: int, train_step: int, progress: float | None
) -> float:
    """Return where in the schedule an update is: from 0 to 1."""
    if schedule.over == "stop":
        if progress is None:
            raise ValueError("a schedule over stop needs the used share of it with every batch")
        return min(1.0, max(0.0, progress))
    if schedule.num_train_steps is None:
        raise ValueError("a schedule over train_steps needs num_train_steps")
    length = max(1, schedule.num_train_steps - warmup_train_steps)
    return min(1.0, max(0.0, (train_step - warmup_train_steps) / length))


def _decay(schedule: Schedule, place: float) -> float:
    least = schedule.min_ratio
    if schedule.kind == "cosine":
        return least + (1 - least) * (1 + math.cos(math.pi * place)) / 2
    share = 1.0 if schedule.kind == "linear" else schedule.decay_share
    fallen = max(0.0, (place - (1 - share)) / share)
    return 1 - (1 - least) * fallen


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
        z = (norm - self._mean) / (deviation + NORM_EPS)
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
