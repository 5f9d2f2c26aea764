"""Updates that stay sound as learning goes on: divisor, floors, entropy, credit, truncation."""

from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt

import numpy as np
import pytest
import torch
from support.algorithm_cases import (
    Case,
    flat_advantages,
    gradient,
    group,
    logs,
    plain_group,
    trajectory,
)
from support.small_models import make_groups, make_trainer, save_model

from rollart_algorithms.aggregation import sample_sums, tokens_of_sample
from rollart_algorithms.dapo import DAPO
from rollart_algorithms.dr_grpo import DrGRPO
from rollart_algorithms.gigpo import GiGPO
from rollart_algorithms.grpo import GRPO
from rollart_algorithms.gspo import GSPO
from rollart_algorithms.ppo import PPO
from rollart_algorithms.rloo import RLOO
from rollart_algorithms.sft import SFT
from rollart_algorithms.topr import TOPR
from rollart_core.contracts.algorithm import Algorithm, LossBatch
from rollart_core.errors import ConfigError
from rollart_core.training.head import Targets, score
from rollart_core.training.mixture import AlgorithmMix
from rollart_core.types import Group
from rollart_testing import assert_checks, check_algorithm

FLAT = [plain_group([1, 1, 1, 1], f"g{i}") for i in range(1, 8)]
RARE = plain_group([0, 1, 1, 1], "g0")


def largest_slope(algorithm: Algorithm, groups: Sequence[Group]) -> float:
    case = Case(algorithm, groups)
    now = torch.full((int(case.batch.loss_mask.sum()),), -1.0, dtype=torch.float64)
    return float(gradient(lambda at: case.loss(at)[0], now).abs().max())


def test_a_rare_failure_weighs_the_same_however_many_groups_are_solved() -> None:
    for algorithm in (DAPO, DrGRPO, RLOO, GRPO):
        alone = largest_slope(algorithm(proximal="inference"), [RARE])
        among = largest_slope(algorithm(proximal="inference"), [RARE, *FLAT])
        assert among == pytest.approx(alone / 8)
        dropping = algorithm(proximal="inference", zero_advantage="drop")
        # the former default: the one failure weighs as much as a whole batch of failures
        assert largest_slope(dropping, [RARE, *FLAT]) == pytest.approx(alone)


def test_a_floor_bounds_what_a_rare_failure_counts() -> None:
    rewards = [0.0] + [1.0] * 15
    # mean 15/16, variance 15/256: sqrt(15)/16 is the standard deviation
    plain = flat_advantages(GRPO(), [plain_group(rewards)])
    assert plain[0] == pytest.approx(-sqrt(15), abs=1e-5)
    floored = flat_advantages(GRPO(std_floor=0.5), [plain_group(rewards)])
    assert floored[0] == pytest.approx(-15 / 16 / 0.5)
    # a floor below the deviation, and groups without any, are as before
    assert flat_advantages(GRPO(std_floor=0.1), [plain_group([0, 1])]) == [-1, 1]
    assert flat_advantages(GRPO(std_floor=0.5), [plain_group([1, 1])]) == [0, 0]
    # steps of GiGPO are divided by their own
    pair = [group([trajectory(1.0, states=("a",)), trajectory(0.0, states=("a",))])]
    assert flat_advantages(GiGPO(std_floor=1.0), pair) == pytest.approx([1, -1])


def test_batch_std_is_that_of_all_rewards() -> None:
    # rewards 0, 1 and 2, 5: mean 2, squares 4 + 1 + 0 + 9 = 14, variance 3.5
    groups = [plain_group([0, 1], "g0"), plain_group([2, 5], "g1")]
    std = sqrt(3.5)
    values = flat_advantages(GRPO(normalise="batch_std"), groups)
    assert values == pytest.approx([x / std for x in (-0.5, 0.5, -1.5, 1.5)])
    floored = flat_advantages(GRPO(normalise="batch_std", std_floor=2.0), groups)
    assert floored == pytest.approx([-0.25, 0.25, -0.75, 0.75])


def scaled(algorithm: Algorithm, groups: Sequence[Group]) -> float:
    from rollart_core.training.batch import make_rows, split

    rows = make_rows(groups, algorithm.advantages(groups, {}), 0)
    (minibatch,) = split(
        rows, 1, algorithm.zero_advantage, min_effective_groups=algorithm.min_effective_groups
    )
    return minibatch.loss_scale


def test_a_batch_of_few_effective_groups_is_scaled_by_their_share() -> None:
    algorithm = GRPO(min_effective_groups=4)
    lively = [plain_group([0, 1], f"h{i}") for i in range(4)]
    assert scaled(algorithm, [RARE, *FLAT]) == 0.25
    assert scaled(algorithm, [*lively[:3], *FLAT]) == 0.75
    assert scaled(algorithm, lively) == 1.0
    assert scaled(algorithm, [RARE, *FLAT, *lively]) == 1.0
    assert scaled(GRPO(), [RARE, *FLAT]) == 1.0
    assert scaled(algorithm, FLAT) == 0.0


def test_a_mix_counts_the_groups_of_the_whole_batch() -> None:
    assert AlgorithmMix({"a": GRPO(min_effective_groups=2), "b": DAPO(min_effective_groups=2)})
    with pytest.raises(ConfigError, match="min_effective_groups counts the groups of the whole"):
        AlgorithmMix({"a": GRPO(min_effective_groups=2), "b": GRPO()})


# Entropy


def naive(logits: torch.Tensor) -> torch.Tensor:
    probs = torch.softmax(logits, -1)
    return -(probs * probs.log()).sum(-1)


def test_the_gradient_of_logprobs_and_entropy_is_autograds() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 7, generator=generator, dtype=torch.float64) * 3
    rows, targets = torch.tensor([0, 0, 2, 4, 3]), torch.tensor([1, 6, 3, 3, 0])
    by_pair, by_row = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))

    def by_hand(logits: torch.Tensor) -> torch.Tensor:
        logprobs, entropy = score(logits, Targets(rows, targets), entropy_gradient=True)
        return (logprobs * by_pair).sum() + (entropy * by_row).sum()

    def plain(logits: torch.Tensor) -> torch.Tensor:
        logprobs = torch.log_softmax(logits, -1)[rows, targets]
        return (logprobs * by_pair).sum() + (naive(logits) * by_row).sum()

    found, wanted = gradient(by_hand, start), gradient(plain, start)
    assert found.flatten().tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-12)
    # one of both alone
    for keep in (0, 1):
        logits = start.clone().requires_grad_()
        score(logits, Targets(rows, targets), entropy_gradient=True)[keep].sum().backward()
        alone = gradient(
            lambda z, keep=keep: (torch.log_softmax(z, -1)[rows, targets], naive(z))[keep].sum(),
            start,
        )
        assert logits.grad is not None
        assert logits.grad.flatten().tolist() == pytest.approx(alone.flatten().tolist(), abs=1e-12)


def test_a_certain_token_has_an_entropy_of_0_without_slope() -> None:
    logits = torch.tensor([[0.0, -1e4, -1e4]], requires_grad=True)
    first = Targets.one_per_row(torch.tensor([0]))
    _, entropy = score(logits, first, entropy_gradient=True)
    entropy.sum().backward()
    assert entropy.tolist() == [0]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0, 0, 0]]


def test_without_a_coefficient_no_gradient_is_kept() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    _, entropy = score(logits, Targets.one_per_row(torch.tensor([0, 0])))
    assert not entropy.requires_grad
    assert not GRPO().wants_entropy
    assert not SFT().wants_entropy
    assert GRPO(entropy_coef=0.01).wants_entropy
    assert AlgorithmMix({"a": GRPO(entropy_coef=0.01), "b": GRPO(kl_coef=0.1)}).wants_entropy


@pytest.mark.parametrize("algorithm", [GRPO, DAPO, DrGRPO, TOPR, PPO], ids=lambda a: a.__name__)
def test_the_bonus_has_the_divisor_of_the_loss(algorithm: type) -> None:
    members = [trajectory(1.0, (2,)), trajectory(0.0, (1,))]
    values = {"values": (0.1, 0.2, 0.3)} if algorithm is PPO else {}
    own = {} if algorithm is TOPR else {"proximal": "inference"}
    entropy = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)

    def loss_of(coef: float) -> torch.Tensor:
        case = Case(algorithm(entropy_coef=coef, **own), [group(members)], values)
        said = {"entropy": entropy, "values": entropy}
        return case.loss(logs((0.4, 0.4, 0.4)), said)[0]

    share = {
        GRPO: ((0.5 + 0.25) / 2 + 2.0) / 2,
        DrGRPO: (0.5 + 0.25 + 2.0) / 2,
        TOPR: (0.5 + 0.25 + 2.0) / 2,
    }.get(algorithm, (0.5 + 0.25 + 2.0) / 3)
    assert float(loss_of(0.0) - loss_of(0.1)) == pytest.approx(0.1 * share)


def test_an_algorithm_with_the_bonus_keeps_its_contract() -> None:
    assert_checks(check_algorithm(GRPO(entropy_coef=0.1, mask_truncated=True)))


# GSPO-token


def two_turns() -> list[Group]:
    """Return a group whose members earn in turns: their tokens have advantages of both signs."""
    return [
        group(
            [
                trajectory(1.0, (2, 3), earned=(1.0, 0.0), inference=[-1.0] * 5),
                trajectory(1.0, (1, 2), earned=(0.0, 1.0), inference=[-0.7] * 3),
                trajectory(0.0, (2, 1), earned=(0.0, 0.0), inference=[-0.4] * 3),
            ]
        )
    ]


class OldGSPO(GSPO):
    """One ratio for the sample with the gradient of all its tokens in each."""

    def _levelled(self, log_ratio: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        return sample_sums(log_ratio, batch) / tokens_of_sample(batch, log_ratio.dtype)


WIDE = {"proximal": "inference", "clip_low": 1.0, "clip_high": 9.0}


def slope_of(algorithm: Algorithm, groups: list[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of each token's logprob, and its advantage."""
    case = Case(algorithm, groups)
    num_tokens = int(case.batch.loss_mask.sum())
    now = torch.linspace(-1.2, -0.3, num_tokens, dtype=torch.float64)
    return gradient(lambda at: case.loss(at)[0], now), case.batch.advantages[case.batch.loss_mask]


def test_each_token_moves_as_its_own_advantage_says() -> None:
    options = {**WIDE, "credit": "turn"}
    slope, advantages = slope_of(GSPO(**options), two_turns())
    assert (advantages > 0).any()
    assert (advantages < 0).any()
    assert torch.equal(slope.sign(), -advantages.sign())
    old, _ = slope_of(OldGSPO(**options), two_turns())
    wrong = (old.sign() == advantages.sign()) & (advantages != 0)
    assert int(wrong.sum()) >= 2


@pytest.mark.parametrize("how", ["sample_mean", "token_mean", "sample_sum"])
def test_with_one_advantage_a_sample_it_is_the_gradient_of_the_samples_ratio(how: str) -> None:
    options = {**WIDE, "loss_aggregation": how}
    slope, advantages = slope_of(GSPO(**options), two_turns())
    old, _ = slope_of(OldGSPO(**options), two_turns())
    assert advantages.any()
    assert slope.tolist() == pytest.approx(old.tolist(), rel=1e-12)


# Truncation


def truncated(group: Group, *members: int) -> Group:
    return replace(
        group,
        trajectories=tuple(
            replace(t, status="truncated") if i in members else t
            for i, t in enumerate(group.trajectories)
        ),
    )


def test_a_truncated_trajectory_gives_no_gradient_and_counts_in_the_rest() -> None:
    groups = [truncated(group([trajectory(r, (2,)) for r in (1.0, 0.0, 0.5)]), 1)]
    advantages = flat_advantages(GRPO(normalise="none", mask_truncated=True), groups)
    assert advantages == [0.5, 0.5, 0, 0, 0, 0]
    assert flat_advantages(GRPO(normalise="none"), groups) == [0.5, 0.5, -0.5, -0.5, 0, 0]
    options = {"proximal": "inference", "kl_coef": 0.1, "entropy_coef": 0.1}
    for cut in (False, True):
        case = Case(GRPO(**options, mask_truncated=cut), groups, {"ref_logprobs": [-2.0] * 6})
        now = torch.full((6,), -1.5, dtype=torch.float64)
        slope = gradient(lambda at, c=case: c.loss(at, {"entropy": at * at})[0], now)
        assert bool(slope[2:4].any()) is not cut
        assert slope[:2].all()
        assert case.batch.total_loss_tokens == 6


def test_a_critic_learns_nothing_of_what_is_left_out() -> None:
    groups = [truncated(group([trajectory(1.0, (2,)), trajectory(0.0, (2,))]), 1)]
    case = Case(PPO(mask_truncated=True, proximal="inference"), groups, {"values": [0.5] * 4})
    now = logs((0.4,) * 4)
    values = torch.full((4,), 0.3, dtype=torch.float64)
    slope = gradient(lambda at: case.loss(now, {"values": at})[0], values)
    assert slope[:2].all()
    assert not slope[2:].any()


def test_what_was_cut_off_is_not_taken_for_an_end() -> None:
    whole = group([trajectory(0.0, (2,))])
    cut = truncated(whole, 0)
    values = {"values": (0.5, 0.25)}
    plain = PPO(normalise="none", discount=0.9)
    # without: delta_1 = 0 - 0.25, delta_0 = 0.9 * 0.25 - 0.5, A_0 = delta_0 + 0.9 delta_1
    assert flat_advantages(plain, [cut], values) == pytest.approx([-0.5, -0.25])
    boots = PPO(normalise="none", discount=0.9, bootstrap_truncated=True)
    # with: delta_1 = 0.9 * 0.25 - 0.25 = -0.025; A_0 = -0.275 - 0.9 * 0.025
    assert flat_advantages(boots, [cut], values) == pytest.approx([-0.2975, -0.025])
    assert flat_advantages(boots, [whole], values) == pytest.approx([-0.5, -0.25])


def test_the_sampled_entropy_is_that_of_all_tokens() -> None:
    from rollart_core.training.batch import batch_metrics, make_rows

    groups = [
        group([trajectory(0.0, inference=[log(0.5)]), trajectory(1.0, inference=[log(0.5)])], "g0"),
        group([trajectory(1.0, (2,), inference=[log(0.25)] * 2), trajectory(1.0, (0,))], "g1"),
    ]
    metrics = batch_metrics(make_rows(groups, GRPO().advantages(groups, {}), 0))
    assert metrics["sampled_entropy"] == pytest.approx((2 * log(2) + 2 * log(4)) / 4)
    assert metrics["effective_groups"] == metrics["zero_advantage_groups"] == 1
    assert np.isfinite(batch_metrics([])["sampled_entropy"])


# The trainer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def test_the_trainer_scales_the_loss_and_reports_the_groups_that_count(model_path: str) -> None:
    groups = make_groups(2)
    norms = {}
    for least in (None, 2, 4):
        trainer = make_trainer(model_path, GRPO(min_effective_groups=least))
        (report,) = trainer.train_batch(groups, 0)
        norms[least] = report.metrics["grad_norm"]
        assert report.metrics["effective_groups"] == 2
    assert norms[2] == norms[None]
    assert norms[4] == pytest.approx(norms[None] / 2, rel=1e-5)


def test_the_bonus_makes_the_policy_less_certain_of_solved_groups_too(model_path: str) -> None:
    (live,) = make_groups(1)
    members = tuple(replace(t, reward=1.0) for t in live.trajectories)
    flat = replace(live, trajectories=members)
    trainer = make_trainer(model_path, GRPO(entropy_coef=0.1), lr=3e-3)
    reports = [trainer.train_batch([flat], n)[0].metrics for n in range(4)]
    entropies = [metrics["entropy"] for metrics in reports]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.01
    assert reports[0]["loss"] == pytest.approx(-0.1 * entropies[0], rel=1e-5)
