"""Dr. GRPO: GRPO done right, without its two biases.

Takes, gives and never: as in ``grpo.py``, with other defaults.

    A_i  = R_i - mean(R)                       not divided by the standard deviation, which gives
                                               easier and harder questions more weight
    loss = 1/B sum_i sum_t l_it                not divided by a sample's length, which makes wrong
                                               answers cost less the longer they are

arXiv:2503.20783 (Dr. GRPO), section 3. Its code also divides by a constant: use
``sample_sum_norm`` for that. ``B`` counts all samples. With ``zero_advantage: drop`` the divisor
depends on the rewards, which is another bias.
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
