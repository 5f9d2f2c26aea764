"""CISPO: clip the importance weight instead of the update.

Takes, gives and never: as in ``grpo.py``, except for the objective.

    l_it = -sg(clip(r, 1 - low, 1 + high)) A_i log pi            sg: no gradient
    loss = sum_i sum_t l_it / sum_i n_i

arXiv:2506.13585 (MiniMax-M1), equations 4 and 5. Rare tokens with a large ratio (the forks of a
chain of thought) keep a gradient, with a bounded weight.
"""

from __future__ import annotations

import torch

from rollart_algorithms.config import CISPOConfig
from rollart_algorithms.grpo import GRPO
from rollart_core.contracts.algorithm import LossBatch


class CISPO(GRPO):
    """REINFORCE with group-relative advantages and clipped importance weights.

    Args:
        options: The fields of :class:`CISPOConfig`.
    """

    config_class = CISPOConfig

    def gain(
        self, log_ratio: torch.Tensor, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted log likelihood, and a mask of the tokens whose weight is clipped."""
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return weight * batch.advantages * trainer_logprobs, weight != ratio
