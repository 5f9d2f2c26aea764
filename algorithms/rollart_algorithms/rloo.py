"""RLOO: REINFORCE with the other members of the group as the baseline.

Takes, gives and never: as in ``grpo.py``, except for the baseline and the defaults.

    A_i  = R_i - 1/(M - 1) sum_{j != i} R_j
    loss = -1/B sum_i sum_t min(r A_i, clip(r, 1 - low, 1 + high) A_i)

arXiv:2402.14740 (Ahmadian et al.), where the gradient is ``A_i grad log pi(y_i)``. This loss has
the same gradient on the first update on a batch, when ``r`` is 1. ``ratio_level: sample_sum`` with
``loss_aggregation: sample_mean`` treats the whole sample as one action in later updates too. The
gradient is an unbiased estimate only if ``B`` counts all samples (``zero_advantage: keep``).
"""

from __future__ import annotations

from typing import ClassVar

from rollart_algorithms.config import RLOOConfig
from rollart_algorithms.group_advantages import Baseline
from rollart_algorithms.grpo import GRPO


class RLOO(GRPO):
    """REINFORCE leave-one-out.

    Args:
        options: The fields of :class:`RLOOConfig`.
    """

    config_class = RLOOConfig
    baseline: ClassVar[Baseline] = "leave_one_out"
