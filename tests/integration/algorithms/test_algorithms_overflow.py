"""Ratios too large for a float: what a clip, or a weight of 0, holds has gradient 0, not NaN."""

import math

import pytest
import torch
from support.algorithm_cases import Case, group, trajectory

from rollart_algorithms.cispo import CISPO
from rollart_algorithms.grpo import GRPO
from rollart_algorithms.gspo import GSPO
from rollart_algorithms.policy_gradient import MAX_LOG_RATIO
from rollart_algorithms.rloo import RLOO
from rollart_algorithms.topr import TOPR
from rollart_core.contracts.algorithm import Algorithm

PRODUCT = {"proximal": "inference", "ratio_level": "sample_sum"}
# What the log ratio of each of two tokens may be: their sum is too large for a float, neither is.
PRECISIONS = [
    pytest.param(torch.float32, 59.0, id="float32"),
    pytest.param(torch.float64, 400.0, id="float64"),
]


def loss_and_slope(case: Case, dtype: torch.dtype) -> tuple[float, list[float]]:
    """Return loss and gradient, in this precision, where the trainer gives every token 1/e."""
    part = case.batch
    part.advantages = part.advantages.to(dtype)
    part.inference_logprobs = part.inference_logprobs.to(dtype)
    part.signals = {name: tensor.to(dtype) for name, tensor in part.signals.items()}
    now = torch.full((int(part.loss_mask.sum()),), -1.0, dtype=dtype, requires_grad=True)
    loss, _ = case.loss(now)
    loss.backward()
    assert now.grad is not None
    return float(loss.detach()), now.grad.tolist()


def slope(
    algorithm: Algorithm, dtype: torch.dtype, up: float, rewards: tuple[float, ...] = (1.0, 0.0)
) -> list[float]:
    """Return the gradient of a group whose first member has two tokens of this log ratio.

    The others have one token each, as likely as it was, and so have references.
    """
    first = trajectory(rewards[0], (2,), inference=(-1.0 - up, -1.0 - up))
    members = [first, *(trajectory(reward, inference=(-1.0,)) for reward in rewards[1:])]
    signals = {name: [-1.0] * (len(rewards) + 1) for name in algorithm.requires}
    loss, found = loss_and_slope(Case(algorithm, [group(members)], signals), dtype)
    assert math.isfinite(loss)
    return found


@pytest.mark.parametrize(("dtype", "up"), PRECISIONS)
@pytest.mark.parametrize(
    "options", [{}, {"clip_low": 0.0, "clip_high": 3.0}, {"dual_clip": 2.0}], ids=str
)
def test_the_clip_holds_a_product(options: dict[str, float], dtype: torch.dtype, up: float) -> None:
    # A = (1, -1): the first sample is clipped; the second has -A r, of two samples
    assert slope(RLOO(**PRODUCT, **options), dtype, up) == pytest.approx([0, 0, 0.5])


@pytest.mark.parametrize(("dtype", "up"), PRECISIONS)
def test_the_second_clip_holds_a_product(dtype: torch.dtype, up: float) -> None:
    # A = (-1, 1): the first sample counts as -2
    algorithm = RLOO(**PRODUCT, dual_clip=2.0)
    assert slope(algorithm, dtype, up, (0.0, 1.0)) == pytest.approx([0, 0, -0.5])


@pytest.mark.parametrize(("dtype", "up"), PRECISIONS)
def test_an_advantage_of_0_holds_a_product(dtype: torch.dtype, up: float) -> None:
    # A = (0, 0.75, -0.75), of three samples; the divergence is least, and flat, at the reference
    algorithm = RLOO(**PRODUCT, kl_coef=0.1)
    assert slope(algorithm, dtype, up, (0.5, 1.0, 0.0)) == pytest.approx([0, 0, -0.25, 0.25])


@pytest.mark.parametrize(("dtype", "up"), PRECISIONS)
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GRPO(proximal="inference"), [0, 0, 0.5]),
        (GSPO(proximal="inference"), [0, 0, 0.5]),
        (CISPO(proximal="inference"), [-1.28 / 3, -1.28 / 3, 1 / 3]),
        (TOPR(), [-0.25, -0.25, 0.25]),
    ],
    ids=["grpo", "gspo", "cispo", "topr"],
)
def test_ratios_of_tokens_and_their_mean_are_held(
    algorithm: Algorithm, expected: list[float], dtype: torch.dtype, up: float
) -> None:
    assert slope(algorithm, dtype, 2 * up) == pytest.approx(expected)


@pytest.mark.parametrize("up", [39.0, 59.0])
def test_a_product_that_nothing_holds_goes_on_teaching(up: float) -> None:
    # A = (-1, 1) and one clip: each token has the ratio in the loss of both, of two samples
    found = slope(RLOO(**PRODUCT), torch.float32, up, (0.0, 1.0))
    ratio = math.exp(min(2 * up, MAX_LOG_RATIO))
    assert found == pytest.approx([ratio, ratio, -0.5], rel=1e-4)


@pytest.mark.parametrize(
    ("correction", "weight"), [("sequence_truncate", 2.0), ("sequence_mask", 0.0)]
)
@pytest.mark.parametrize(("dtype", "up"), PRECISIONS)
def test_weights_that_overflow_too_are_cut_off(
    correction: str, weight: float, dtype: torch.dtype, up: float
) -> None:
    # the first sample moved as far before the update as since; A = (-1, 1), the second clip at 3
    first = trajectory(0.0, (2,), inference=(-1.0 - 2 * up, -1.0 - 2 * up))
    batch = [group([first, trajectory(1.0, inference=(-1.0,))])]
    algorithm = RLOO(ratio_level="sample_sum", importance_correction=correction, dual_clip=3.0)
    case = Case(algorithm, batch, {"proximal_logprobs": (-1.0 - up, -1.0 - up, -1.0)})
    loss, found = loss_and_slope(case, dtype)
    assert loss == pytest.approx((2 * 3 * weight - 1) / 2)
    assert found == pytest.approx([0, 0, -0.5])


def test_a_weight_of_0_holds_a_product_that_no_clip_does() -> None:
    # as above, without the second clip: the first sample is masked
    first = trajectory(0.0, (2,), inference=(-119.0, -119.0))
    batch = [group([first, trajectory(1.0, inference=(-1.0,))])]
    algorithm = RLOO(ratio_level="sample_sum", importance_correction="sequence_mask")
    case = Case(algorithm, batch, {"proximal_logprobs": (-60.0, -60.0, -1.0)})
    loss, found = loss_and_slope(case, torch.float32)
    assert loss == pytest.approx(-0.5)
    assert found == pytest.approx([0, 0, -0.5])
