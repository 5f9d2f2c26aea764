"""Dr. GRPO: GRPO done right, without its two biases.

Takes, gives and never: as ``grpo.py``, with other defaults.

    A_i  = R_i - mean(R)                       not divided by the standard deviation, which makes
                                               questions count more the easier or harder they are
    loss = 1/B sum_i sum_t l_it                not divided by a sample's length, which makes wrong
                                               answers cost less the longer they are

arXiv:2503.20783 (Dr. GRPO), section 3. Its code divides by a constant besides: that is
``sample_sum_norm``. ``B`` counts all samples: with ``zero_advantage: drop`` the divisor depends on
the rewards, which is a bias of another kind.
"""

from __future__ import annotations

from rollart_algorithms.config import DrGRPOConfig
from rollart_algorithms.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO without normalisation by standard deviation or by length.

    Args:
        options: The fields of :class:`DrGRPOConfig`.
    """

    config_class = DrGRPOConfig
