"""AdamW with a schedule, clipped gradients, a bounded step, and checks for non-finite numbers.

    gradients -> norm -> not finite, or an outlier (trainer.clip): no update
                      -> clip -> AdamW at lr * schedule -> KL above max_kl: undo, half the step

Takes: parameters with gradients. Gives: one update, or the reason why there is none. Several
consecutive updates with a non-finite loss or gradient are an error. Never: computes a loss.

**Schedule**, the factor of ``trainer.lr`` at each update:

    warm-up (linear, W updates)  *  decay at the position p in [0, 1] of the schedule

    linear   1 - (1 - m) p
    cosine   m + (1 - m) (1 + cos(pi p)) / 2             arXiv:1608.03983, equation 5, one period
    wsd      1 until p = 1 - d, then linear down to m    arXiv:2404.06395

with m ``min_ratio`` and d ``decay_share``. Over updates, p is ``(s - W) / (N - W)``, with s the
number of applied updates and N ``num_train_steps``. Over ``stop``, it is the used share of
``stop``. It depends on nothing else, so a run resumed from a checkpoint has the same learning
rates.

**Clipping**, the bound of a gradient's norm, by the norms of the gradients before it:

    norm      only at ``trainer.grad_clip``
    quantile  AutoClip (arXiv:2007.14469): at the q-quantile of the last norms,
              including the current one
    zscore    ZClip (arXiv:2504.02507): a norm g with z = (g - mu) / sigma > z_t is
              scaled to mu + z_t^2 sigma / z. Then, with the scaled norm g',
              mu <- a mu + (1 - a) g', and after that var <- a var + (1 - a) (g' - mu)^2.
              The first norms determine the initial mean and variance.

``grad_clip`` is the upper bound of all. If a norm is above ``skip_above`` times the threshold, the
update is skipped. The history stores such a norm as exactly that limit (``zscore``: as the
threshold), so that norms which stay large do not remain outliers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rollart_core.errors import TrainingDiverged
from rollart_core.training import distributed
from rollart_core.training.step_kl import BoundedStep, bounded_step

if TYPE_CHECKING:  # the tests on GPUs run without pydantic
    from rollart_core.config.run import Trainer as TrainerConfig
    from rollart_core.config.training import QuantileClip, Schedule, Trainer, ZScoreClip

MAX_SKIPPED = 3
"""The run ends after this number of consecutive updates with a non-finite loss or gradient."""

NORM_EPS = 1e-6
"""Added to the standard deviation, as in ZClip."""


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The outcome of one update."""

    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    updated: bool
    clip: ClipDecision | None = None
    """None if loss or gradient were not finite."""
    step: BoundedStep | None = None
    """None if the KL of the step was not measured."""

    def metrics(self) -> dict[str, float]:
        """Return its metrics for a report."""
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
        parameters: Name -> parameter; weight decay applies to matrices, not to vectors.
        config: Learning rate, warm-up, schedule, clipping, betas and other settings.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: TrainerConfig) -> None:
        self._config = config
        self._parameters = parameters
        self._skipped = 0
        self.train_step = 0
        """Number of applied updates."""
        self.clipping = make_clipping(config)
        self.lr_factor = 1.0
        """Factor of the configured learning rate."""
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
        """Reset all gradients."""
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
        """Clip, check, and update with the gradients of the parameters.

        Args:
            loss: The loss of these gradients.
            lr: Learning rate. If None, the configured one with its warm-up and schedule.
            progress: The used share of ``stop``, for a schedule over it.
            holds: Do not change the parameters; the train step counts nevertheless.
            measure_kl: Returns the KL from the parameters before the step to the current ones;
                requires ``max_kl``.

        Raises:
            TrainingDiverged: If three consecutive updates are not finite.
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
        """Continue from a loaded checkpoint."""
        self.train_step = train_step
        self._skipped = 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments and step counts by parameter name, to save or to load into."""
        for p in self._parameters.values():
            if not self._adamw.state[p]:
                self._adamw.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return {name: dict(self._adamw.state[p]) for name, p in self._parameters.items()}

    def moments(self) -> Iterator[Tensor]:
        """Yield the moments and step counts that exist so far."""
        for of_one in self._adamw.state.values():
            yield from (value for value in of_one.values() if isinstance(value, Tensor))

    def _lr(self, progress: float | None) -> float:
        config = self._config
        scheduled = lr_factor(config.schedule, config.warmup_train_steps, self.train_step, progress)
        return config.lr * scheduled * self.lr_factor

    def _take(self, lr: float, measure_kl: Callable[[], float] | None) -> BoundedStep | None:
        """Take the step; with ``measure_kl``, only the share that ``max_kl`` allows."""

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
                f"{self._config.lr}) or trainer.grad_clip, or check the rewards"
            )


def lr_factor(
    schedule: Schedule, warmup_train_steps: int, train_step: int, progress: float | None
) -> float:
    """Return the factor of ``trainer.lr`` at the next update.

    Args:
        schedule: The section; a schedule over updates requires ``num_train_steps``.
        warmup_train_steps: Number of warm-up updates, W.
        train_step: Number of applied updates.
        progress: The used share of ``stop``, if the schedule is over it.

    Raises:
        ValueError: If a value that the schedule requires is missing.
    """
    warmup = min(1.0, (train_step + 1) / max(1, warmup_train_steps))
    if schedule.kind == "constant":
        return warmup
    return warmup * _decay(schedule, _place(schedule, warmup_train_steps, train_step, progress))


def _place(
    schedule: Schedule, warmup_train_steps: int, train_step: int, progress: float | None
) -> float:
    """Return the position of an update in the schedule, from 0 to 1."""
    if schedule.over == "stop":
        if progress is None:
            raise ValueError("a schedule over stop needs the used share of stop with every batch")
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
    """The decision about one gradient."""

    norm: float
    threshold: float
    """A larger norm is clipped."""
    max_norm: float
    """The gradient is scaled to this norm if it is larger."""
    skipped: bool = False
    """Whether it is an outlier, so that no update is applied."""

    @property
    def clipped(self) -> bool:
        """Whether the gradient is scaled."""
        return self.norm > self.max_norm


class Clipping(Protocol):
    """Decides about gradients, one after another."""

    def decide(self, norm: float) -> ClipDecision:
        """Return the decision about a gradient of this finite norm, and store the norm."""

    def state(self) -> list[float]:
        """Return the state in a checkpoint; its length is constant."""

    def load_state(self, state: Sequence[float]) -> None:
        """Continue from the result of :meth:`state`."""


class FixedClipping:
    """Clipping at a fixed norm (``kind: norm``)."""

    def __init__(self, grad_clip: float) -> None:
        self._grad_clip = grad_clip

    def decide(self, norm: float) -> ClipDecision:
        """Clip at ``grad_clip``."""
        return ClipDecision(norm, self._grad_clip, self._grad_clip)

    def state(self) -> list[float]:
        """Return an empty list."""
        return []

    def load_state(self, state: Sequence[float]) -> None:
        """Do nothing."""


class QuantileClipping:
    """Clipping at a quantile of the last norms (``kind: quantile``); see the module."""

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
        """Return the number of norms so far, and the last norms, padded with zeros."""
        missing = self._config.window - len(self._norms)
        return [float(self._num_seen), *self._norms, *([0.0] * missing)]

    def load_state(self, state: Sequence[float]) -> None:
        """Continue from the result of :meth:`state`."""
        self._num_seen = int(state[0])
        last = state[1 : 1 + min(self._num_seen, self._config.window)]
        self._norms = deque(last, maxlen=self._config.window)


class ZScoreClipping:
    """Clipping of outliers by their z-score (``kind: zscore``); see the module."""

    def __init__(self, config: ZScoreClip, grad_clip: float) -> None:
        self._config = config
        self._grad_clip = grad_clip
        self._num_seen = 0
        self._mean = 0.0
        self._variance = 0.0

    def decide(self, norm: float) -> ClipDecision:
        """Clip the norm of an outlier."""
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
        """Return the number of norms so far, their mean and their variance."""
        return [float(self._num_seen), self._mean, self._variance]

    def load_state(self, state: Sequence[float]) -> None:
        """Continue from the result of :meth:`state`."""
        self._num_seen, self._mean, self._variance = int(state[0]), state[1], state[2]

    def _add_to_first(self, norm: float) -> None:
        """Update the mean and the variance of all norms so far (Welford 1962)."""
        self._num_seen += 1
        before = self._mean
        self._mean += (norm - before) / self._num_seen
        gained = (norm - before) * (norm - self._mean) - self._variance
        self._variance += gained / self._num_seen

    def _remember(self, norm: float) -> None:
        """Update the moving mean, then the moving variance."""
        decay = self._config.ema_decay
        self._num_seen += 1
        self._mean = decay * self._mean + (1 - decay) * norm
        self._variance = decay * self._variance + (1 - decay) * (norm - self._mean) ** 2


def make_clipping(config: Trainer) -> Clipping:
    """Return the clipping that a ``trainer`` section configures, without history."""
    clip = config.clip
    match clip.kind:
        case "quantile":
            return QuantileClipping(clip, config.grad_clip)
        case "zscore":
            return ZScoreClipping(clip, config.grad_clip)
        case "norm":
            return FixedClipping(config.grad_clip)


def _skip_limit(threshold: float, skip_above: float | None) -> float:
    return math.inf if skip_above is None else skip_above * threshold
