"""The base classes of the algorithms: the common parts of their losses.

Takes: packed logprobs. Gives: one loss and its metrics. Never: defines advantages; the file of each
algorithm does that.

    loss = aggregate(objective of each token + kl_coef KL - entropy_coef H)

``H`` is the entropy of the token's whole distribution, with gradient (arXiv:1602.01783, A3C,
section 4). :class:`PolicyGradient` leaves the objective to subclasses. :class:`RatioPolicy` has the
clipped objective:

    r = pi / pi_proximal                            of a token, or of the sample (ratio_level)
    objective = -w min(r A, clip(r, 1 - low, 1 + high) A)     arXiv:1707.06347 (PPO), section 3
    if A < 0, at most -w c A                                  arXiv:1912.09729 (dual clip)

On the first update on a batch ``r`` is 1, and the gradient is that of REINFORCE:
``-w A grad log pi``. A ratio is at most ``e^80`` (``MAX_LOG_RATIO``).

With ``ratio_level: sample_mean`` each token has the ratio of its sample and its own gradient,

    s_t = sg(s_i) pi_t / sg(pi_t),   s_i = exp(1/n_i sum_t log r_it)        sg: no gradient

This is GSPO-token, arXiv:2507.18071, section 4.3. If all tokens of a sample have the same advantage
and the same weight ``w``, value and gradient equal those of ``s_i`` itself. If they differ, each
token follows its own advantage, which one ``s_i`` for all of them would not allow.

The weight ``w`` is for tokens that another policy sampled than the one that is trained. There are
three policies: the one that sampled (``inference``, possibly some versions old and computed by
another program), the proximal one (``recompute``: the trainer's before the first update on the
batch) and the current one. The weight has no gradient. The metrics count the weights that were cut:

    w = prod_t pi_proximal / pi_inference          of one token, or over the sample (sequence_*)
    *_truncate   min(w, cap)
    *_mask       w where floor <= w <= cap, else 0
    x staleness_discount^staleness

Separating the proximal policy from the one that sampled is arXiv:2110.00641 (decoupled PPO, section
3) and, for asynchronous RL of language models, arXiv:2505.24298 (AReaL, section 5.2); truncating
the weight is equation 1 of arXiv:1802.01561 (V-trace's rho-bar) and, between the engines of one
run, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
Masking tokens outside two bounds is IcePop (arXiv:2510.18855). The discount is similar to
arXiv:1511.05950 (staleness-aware SGD), which divides by the staleness.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from rollart_algorithms.aggregation import (
    TRAJECTORY_TOKENS,
    aggregate,
    sample_sums,
    tokens_of_sample,
    trajectory_tokens,
)
from rollart_algorithms.divergence import kl_tokens
from rollart_algorithms.options import (
    DEFAULT_TIS_CAP,
    LossOptions,
    OffPolicyOptions,
    RatioPolicyOptions,
)
from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals, ZeroAdvantage
from rollart_core.types import FloatArray, Group

Metrics = dict[str, torch.Tensor]

TRAINED = "trained"
"""The target of ``mask_truncated``: 1 at tokens that give a gradient, 0 at all others."""

MAX_LOG_RATIO = 80.0
"""A log ratio is limited to this before it overflows, as the product over a long sample can.

float32 overflows at ``e^88.7``; the difference leaves a margin for advantages and sums. With an
infinite ratio, gradients that are exactly 0 (clipped, or with weight 0) would become NaN."""


class PolicyGradient(Algorithm):
    """An objective of each token, aggregated, with a KL divergence from the reference.

    Args:
        options: The fields of :attr:`config_class`.
    """

    config_class: ClassVar[type[LossOptions]] = LossOptions
    config: LossOptions

    def __init__(self, **options: float | str | None) -> None:
        self.config = self.config_class.model_validate(options)
        self.requires = frozenset(self.wanted_signals())
        self.zero_advantage: ZeroAdvantage = self.zero_advantage_policy()
        self.wants_entropy = self.config.entropy_coef > 0
        self.min_effective_groups = getattr(self.config, "min_effective_groups", None)

    def wanted_signals(self) -> set[str]:
        """Return the names of the signals that these options need."""
        return {"ref_logprobs"} if self.config.kl_coef else set()

    def zero_advantage_policy(self) -> ZeroAdvantage:
        """Return how samples without an advantage are handled."""
        if self.config.zero_advantage == "drop":
            return "drop"
        in_loss = self.config.kl_coef and self.config.kl_in == "loss"
        return "train" if in_loss or self.config.entropy_coef else "skip"

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the estimates, 0 in trajectories without gradient; see :class:`Algorithm`."""
        rows = self.estimates(groups, signals)
        if not self.config.mask_truncated:
            return rows
        return [row * kept for row, kept in zip(rows, _trained_rows(groups), strict=True)]

    @abstractmethod
    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the advantages of all trajectories, including truncated ones.

        The result is that of :meth:`Algorithm.advantages`, before ``mask_truncated`` is applied.
        """

    @abstractmethod
    def objective(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, Metrics]:
        """Return ``[N]`` losses of the tokens and ``[N]`` metrics; masked tokens are ignored.

        Args:
            trainer_logprobs: ``[N]``, with gradient.
            batch: The microbatch.
        """

    def targets(self, groups: Sequence[Group], signals: Signals) -> dict[str, list[FloatArray]]:
        """Return the divisors and the mask of trained tokens; see :class:`Algorithm`."""
        found: dict[str, list[FloatArray]] = {}
        if self.config.loss_aggregation == "trajectory_mean":
            found[TRAJECTORY_TOKENS] = trajectory_tokens(groups)
        if self.config.mask_truncated:
            found[TRAINED] = _trained_rows(groups)
        return found

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the aggregated objective with KL and entropy terms; see :class:`Algorithm`."""
        config, mask = self.config, batch.loss_mask
        tokens, metrics = self.objective(trainer_logprobs, batch)
        if config.kl_coef and config.kl_in == "loss":
            log_ratio = torch.where(mask, batch.signals["ref_logprobs"] - trainer_logprobs, 0.0)
            kl = kl_tokens(log_ratio, config.kl_estimator)
            tokens = tokens + config.kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        if config.entropy_coef:
            tokens = tokens - config.entropy_coef * batch.outputs["entropy"]
        sums = {
            name: torch.where(mask, values, 0.0).max()
            if name.endswith("_max")
            else torch.where(mask, values, 0.0).sum()
            for name, values in metrics.items()
        }
        return self.aggregate(torch.where(mask, tokens, 0.0), batch), sums

    def aggregate(self, tokens: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Aggregate ``[N]`` losses into one number according to the options."""
        if self.config.mask_truncated:
            tokens = torch.where(batch.signals[TRAINED] > 0, tokens, 0.0)
        return aggregate(tokens, batch, self.config.loss_aggregation, self.config.norm_tokens)


class RatioPolicy(PolicyGradient):
    """The clipped objective of ratios, weighted for tokens that another policy sampled."""

    config_class = RatioPolicyOptions
    config: RatioPolicyOptions

    def wanted_signals(self) -> set[str]:
        """Return the names of the signals that these options need."""
        recomputed = self.config.proximal == "recompute"
        return super().wanted_signals() | ({"proximal_logprobs"} if recomputed else set())

    def objective(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the weighted, clipped objective of each token; see :class:`PolicyGradient`."""
        proximal = proximal_logprobs(batch, self.config)
        log_ratio = torch.where(batch.loss_mask, trainer_logprobs - proximal, 0.0)
        gain, is_clipped = self.gain(self._levelled(log_ratio, batch), trainer_logprobs, batch)
        weights, cut = importance_weights(proximal, batch, self.config)
        metrics = {"clip_fraction": is_clipped.float(), "approx_kl": _k3(log_ratio.detach()), **cut}
        return -gain * weights, {**metrics, **self._is_metrics(trainer_logprobs, weights, batch)}

    def gain(
        self, log_ratio: torch.Tensor, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[N]`` gains to maximise, and ``[N]`` bool: True where the clip is active.

        Args:
            log_ratio: ``[N]``, of the level that the options set, with gradient.
            trainer_logprobs: ``[N]``, with gradient.
            batch: The microbatch.
        """
        config, advantages = self.config, batch.advantages
        ratio = _finite_exp(log_ratio)
        free = ratio * advantages
        bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
        is_clipped = bounded < free
        gain = torch.minimum(free, bounded)
        if config.dual_clip is not None:
            least = config.dual_clip * advantages
            is_held = (advantages < 0) & (gain < least)
            gain, is_clipped = torch.where(is_held, least, gain), is_clipped | is_held
        return gain, is_clipped

    def _levelled(self, log_ratio: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        if self.config.ratio_level == "token":
            return log_ratio
        sums = sample_sums(log_ratio, batch)
        if self.config.ratio_level == "sample_sum":
            return sums
        mean = (sums / tokens_of_sample(batch, sums.dtype)).detach()
        return mean + (log_ratio - log_ratio.detach())

    def _is_metrics(
        self, trainer_logprobs: torch.Tensor, weights: torch.Tensor | float, batch: LossBatch
    ) -> Metrics:
        """Return the ratios to the policy that sampled, and the weights that correct for them."""
        log_ratio = torch.where(batch.loss_mask, trainer_logprobs - batch.inference_logprobs, 0.0)
        is_ratio = log_ratio.detach().exp()
        weight = is_ratio if isinstance(weights, float) else weights
        return {
            "is_ratio_mean": is_ratio,
            "is_ratio_max": is_ratio,
            "is_weight_mean": weight,
            "is_weight_sq_mean": weight.square(),
        }


def _trained_rows(groups: Sequence[Group]) -> list[FloatArray]:
    """Return one ``[T]`` per sample: all 1, or all 0 in truncated trajectories."""
    return [
        np.full(sample.num_tokens, trajectory.status != "truncated", dtype=np.float32)
        for group in groups
        for trajectory in group.trajectories
        for sample in trajectory.samples
    ]


def _finite_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``[N]`` ratios of at most ``e^MAX_LOG_RATIO``; beyond it the gradient is that of it.

    A plain clamp has gradient 0 there. That would be wrong for a ratio that is not clipped (the
    advantage is negative and there is no dual clip).
    """
    excess = (log_ratio - MAX_LOG_RATIO).clamp(min=0).detach()
    return (log_ratio - excess).exp()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``[N]``: estimates of KL(proximal || current) from tokens of the proximal policy."""
    return log_ratio.exp() - 1 - log_ratio


def proximal_logprobs(batch: LossBatch, options: OffPolicyOptions) -> torch.Tensor:
    """Return ``[N]`` logprobs of the policy that the ratio is computed against."""
    if options.proximal == "inference":
        return batch.inference_logprobs
    return batch.signals["proximal_logprobs"]


def importance_weights(
    proximal: torch.Tensor, batch: LossBatch, options: OffPolicyOptions
) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
    """Return ``[N]`` weights (or one for all), and metrics of the weights that were cut.

    Args:
        proximal: ``[N]`` logprobs.
        batch: The microbatch.
        options: Options of the correction.
    """
    weights, metrics = _corrected(proximal, batch, options)
    if options.staleness_discount < 1:
        weights = weights * options.staleness_discount ** batch.staleness.to(proximal.dtype)
    return weights, metrics


def _corrected(
    proximal: torch.Tensor, batch: LossBatch, options: OffPolicyOptions
) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
    if options.proximal == "inference" or options.importance_correction == "none":
        return 1.0, {}
    log_weight = torch.where(batch.loss_mask, proximal - batch.inference_logprobs, 0.0).detach()
    if options.importance_correction.startswith("sequence"):
        log_weight = sample_sums(log_weight, batch)
    if options.importance_correction.endswith("_truncate"):
        cap = options.tis_cap or DEFAULT_TIS_CAP
        cut = {"is_truncated_fraction": (log_weight > math.log(cap)).float()}
        return log_weight.exp().clamp(max=cap), cut
    floor, cap = options.mask_bounds
    weights = log_weight.exp()
    kept = (weights >= floor) & (weights <= cap)
    return torch.where(kept, weights, 0.0), {"is_masked_fraction": (~kept).float()}
