"""DAPO: decoupled clip and dynamic sampling.

Takes, gives and never: as in ``grpo.py``, with other defaults.

    A_i  = (R_i - mean(R)) / std(R)
    l_it = -min(r A_i, clip(r, 1 - low, 1 + high) A_i)       clip-higher: high > low, section 3.1
    loss = sum_i sum_t l_it / sum_i n_i                      token-level loss, section 3.3

arXiv:2503.14476 (DAPO). Its two other parts are not in the loss, and any algorithm can use them:
groups whose members all have the same reward are replaced by new ones (dynamic sampling, section
3.2: ``rollout.equal_groups: replace``), and an answer that is too long is penalised in the reward
(section 3.4: ``shaping.overlong``).
"""

from __future__ import annotations

from rollart_algorithms.config import DAPOConfig
from rollart_algorithms.grpo import GRPO


class DAPO(GRPO):
    """GRPO with clip-higher and the token-level loss.

    Args:
        options: The fields of :class:`DAPOConfig`.
    """

    config_class = DAPOConfig
