"""PPO: proximal policy optimisation with a critic.

Takes: groups (also of one member), and the critic's values. Gives: advantages and returns, then the
joint loss of policy and critic. Never: compares members of a group.

With rewards ``r_t``, values ``V_t`` of the state in which token ``t`` was chosen, and ``V = 0``
after the last token. With ``bootstrap_truncated``, the value after the last token of a truncated
trajectory is ``V`` of the state in which that token was chosen, the last one that the critic scored
(arXiv:1712.00378, section 3):

    delta_t = r_t + discount V_{t+1} - V_t                     arXiv:1506.02438 (GAE), section 3
    A_t     = sum_l (discount lambda)^l delta_{t+l}            arXiv:1506.02438, section 3
    G_t     = A_t + V_t                                        target of the critic
    policy  = -w min(r A, clip(r, 1 - low, 1 + high) A)        arXiv:1707.06347 (PPO), section 3
    critic  = 1/2 max((v - G)^2, (V + clip(v - V, -c, c) - G)^2)

``v`` is the critic's current value, ``V`` its value before the first update on the batch. The
clipped loss of the critic is that of PPO's reference implementation (arXiv:2005.12729, section 3).
Tokens that the environment wrote are skipped. The other tokens follow each other in the order of
turns: the tokens of a sub-agent, which is its own sample, lie between those of the agent that
called it. ``r_t`` is the reward at the last token (of the trajectory, or of each turn), minus the
KL penalty at every token (arXiv:1909.08593, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollart_algorithms.config import PPOConfig
from rollart_algorithms.credit import per_trajectory
from rollart_algorithms.divergence import kl_penalties
from rollart_algorithms.policy_gradient import Metrics, RatioPolicy
from rollart_algorithms.timeline import Row, Timeline
from rollart_algorithms.turns import turn_rewards
from rollart_algorithms.whitening import whitened
from rollart_core.contracts.algorithm import LossBatch, Signals, ZeroAdvantage
from rollart_core.types import FloatArray, Group, Trajectory


class PPO(RatioPolicy):
    """Proximal policy optimisation with generalised advantage estimation.

    Args:
        options: The fields of :class:`PPOConfig`.
    """

    config_class = PPOConfig
    config: PPOConfig

    def wanted_signals(self) -> set[str]:
        """Return the names of the signals that these options need."""
        return super().wanted_signals() | {"values"}

    def zero_advantage_policy(self) -> ZeroAdvantage:
        """Return ``train``: the critic learns from every sample."""
        return "train"

    def extra_modules(self, hidden_size: int) -> dict[str, torch.nn.Module]:
        """Return the critic's head; its initial value of every state is 0."""
        return {"values": ValueHead(hidden_size)}

    def estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the advantage of each token; see :class:`PolicyGradient`."""
        rows = self._plain_estimates(groups, signals)
        if self.config.normalise == "none":
            return rows
        return whitened(rows, [s.loss_mask for g in groups for s in g.samples])

    def targets(self, groups: Sequence[Group], signals: Signals) -> dict[str, list[FloatArray]]:
        """Return the ``returns`` that the critic is trained on; see :class:`Algorithm`."""
        pairs = zip(self._plain_estimates(groups, signals), signals["values"], strict=True)
        returns = [(advantages + values).astype(np.float32) for advantages, values in pairs]
        return {**super().targets(groups, signals), "returns": returns}

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the clipped objective with its KL term plus the critic's loss; see the base."""
        loss, metrics = super().loss(trainer_logprobs, batch)
        tokens, is_clipped = self._critic(batch)
        critic = self.aggregate(tokens, batch)
        returns = torch.where(batch.loss_mask, batch.signals["returns"], 0.0)
        errors = torch.where(batch.loss_mask, returns - batch.outputs["values"].detach(), 0.0)
        return loss + self.config.value_coef * critic, {
            **metrics,
            "value_loss": tokens.detach().sum(),
            "value_clip_fraction": is_clipped.float().sum(),
            "value_error_max": errors.abs().max(),
            "return_mean": returns.sum(),
        }

    def _critic(self, batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[N]`` losses of the critic, 0 where masked, and a mask of the clipped ones."""
        now, before, wanted = (
            batch.outputs["values"],
            batch.signals["values"],
            batch.signals["returns"],
        )
        free = (now - wanted).square()
        bounded = free
        if self.config.value_clip is not None:
            move = (now - before).clamp(-self.config.value_clip, self.config.value_clip)
            bounded = (before + move - wanted).square()
        tokens = torch.where(batch.loss_mask, torch.maximum(free, bounded) / 2, 0.0)
        return tokens, batch.loss_mask & (bounded > free)

    def _plain_estimates(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return one ``[T]`` per sample: advantages based on the critic, not normalised."""
        spent = per_trajectory(groups, kl_penalties(groups, signals, self.config))
        values = per_trajectory(groups, signals["values"])
        return [
            row
            for group in groups
            for trajectory in group.trajectories
            for row in self._of(trajectory, next(values), next(spent))
        ]

    def _of(
        self,
        trajectory: Trajectory,
        values: Sequence[FloatArray],
        penalties: Sequence[FloatArray],
    ) -> list[FloatArray]:
        """Return the rows of one trajectory's samples."""
        masks = [s.loss_mask for s in trajectory.samples]
        if not any(mask.any() for mask in masks):
            return [np.zeros(len(mask), dtype=np.float32) for mask in masks]
        timeline = Timeline.of(trajectory)
        rewards = token_rewards(trajectory, timeline, per_turn=self.config.credit == "turn")
        if len(penalties):
            rewards -= timeline.joined(penalties)
        everywhere = self.config.discount_unit == "token"
        at = np.ones_like(timeline.is_end) if everywhere else timeline.is_end
        judged = timeline.joined(values)
        bootstraps = self.config.bootstrap_truncated and trajectory.status == "truncated"
        advantages = generalised_advantages(
            rewards,
            judged,
            np.where(at, self.config.discount, 1.0),
            np.where(at, self.config.gae_lambda, 1.0),
            last_value=float(judged[-1]) if bootstraps else 0.0,
        )
        return timeline.parted(advantages)


class ValueHead(torch.nn.Module):
    """A linear layer that returns one value for each hidden state.

    Args:
        hidden_size: Size of the hidden states.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[K]`` from ``[K, hidden_size]``."""
        values: torch.Tensor = self.linear(hidden).squeeze(-1)
        return values


def token_rewards(trajectory: Trajectory, timeline: Timeline, *, per_turn: bool) -> Row:
    """Return ``[K]`` rewards of tokens in turn order; their sum is the trajectory's reward.

    Args:
        trajectory: A trajectory that did not fail and has at least one sampled token.
        timeline: The timeline of that trajectory.
        per_turn: Whether the reward of a turn is placed on its last token. If False, all reward is
            placed on the last token. The reward of a turn without tokens moves to the next turn
            with tokens, or to the last one.
    """
    rewards = np.zeros(len(timeline.turns), dtype=np.float64)
    if not per_turn:
        rewards[-1] = trajectory.reward or 0.0
        return rewards
    at = np.flatnonzero(timeline.is_end)
    for turn, reward in enumerate(turn_rewards(trajectory)):
        place = int(np.searchsorted(timeline.turns[at], turn))
        rewards[at[min(place, len(at) - 1)]] += reward
    return rewards


def generalised_advantages(
    rewards: Row, values: Row, gamma: Row, lam: Row, *, last_value: float = 0.0
) -> Row:
    """Return ``[K]`` advantages, by the recurrence ``A_t = delta_t + gamma_t lambda_t A_{t+1}``.

    ``gamma_t`` and ``lambda_t`` can differ by token. If they are 1 inside a turn and smaller at its
    end, time is counted in turns.

    Args:
        rewards: ``[K]``.
        values: ``[K]``.
        gamma: ``[K]``, the discount between this token and the next.
        lam: ``[K]``, the same for lambda.
        last_value: The value after the last token: 0 if the episode ended there.
    """
    advantages = []
    ahead, next_value = 0.0, last_value
    # Python numbers: single numpy scalars are several times slower.
    columns = (column[::-1].tolist() for column in (rewards, values, gamma, lam))
    for reward, value, discount, trace in zip(*columns, strict=True):
        delta = reward + discount * next_value - value
        ahead = delta + discount * trace * ahead
        advantages.append(ahead)
        next_value = value
    return np.array(advantages[::-1], dtype=np.float64)
