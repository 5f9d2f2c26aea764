"""Group sequence policy optimisation: one ratio for the whole sample.

Takes, gives and never: as in ``grpo.py``, with other defaults.

    s_i  = (pi(y_i) / pi_proximal(y_i))^(1/n_i) = exp(1/n_i sum_t log r_it)
    loss = -1/B sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

arXiv:2507.18071 (GSPO), section 4.1; the clip bounds are those of its section 5.1. It is computed
as the paper's GSPO-token (section 4.3, see ``policy_gradient.py``), which has the same gradient
if a sample has one advantage, and allows advantages that differ by turn.
"""

from __future__ import annotations

from rollart_algorithms.config import GSPOConfig
from rollart_algorithms.grpo import GRPO


class GSPO(GRPO):
    """GRPO with the geometric mean of a sample's ratios instead of one ratio per token.

    Args:
        options: The fields of :class:`GSPOConfig`.
    """

    config_class = GSPOConfig
