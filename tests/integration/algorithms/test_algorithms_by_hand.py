"""Each algorithm against numbers worked out by hand, in the comments."""

import math
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
    sample,
    trajectory,
)

from rollart_algorithms.cispo import CISPO
from rollart_algorithms.dapo import DAPO
from rollart_algorithms.distillation import OnPolicyDistillation
from rollart_algorithms.dr_grpo import DrGRPO
from rollart_algorithms.gigpo import GiGPO
from rollart_algorithms.grpo import GRPO
from rollart_algorithms.gspo import GSPO
from rollart_algorithms.ppo import PPO
from rollart_algorithms.raft_pp import RAFTPP
from rollart_algorithms.reinforce_pp import ReinforcePP
from rollart_algorithms.rloo import RLOO
from rollart_algorithms.sft import SFT
from rollart_algorithms.starpo import StarPO
from rollart_algorithms.topr import TOPR
from rollart_core.contracts.algorithm import Algorithm
from rollart_core.types import Group

# One group. Its first member has reward 1 and two tokens, its second reward 0 and one. The trainer
# gives them 0.8, 0.5 and 0.25, the policy that sampled gave 0.4, 0.5 and 0.5: ratios 2, 1, 0.5.
NOW = (0.8, 0.5, 0.25)
THEN = (log(0.4), log(0.5), log(0.5))
PAIR = group([trajectory(1.0, (2,), inference=THEN[:2]), trajectory(0.0, (1,), inference=THEN[2:])])


def loss_of(algorithm: Algorithm, **signals: tuple[float, ...]) -> float:
    return float(Case(algorithm, [PAIR], signals).loss(logs(NOW))[0])


def gradient_of(algorithm: Algorithm) -> list[float]:
    case = Case(algorithm, [PAIR])
    return gradient(lambda now: case.loss(now)[0], logs(NOW)).tolist()


def test_grpo_and_dapo() -> None:
    # A = (1, -1). Tokens: min(2, 1.28) = 1.28; min(1, 1) = 1; min(-0.5, -0.8) = -0.8
    # GRPO clips above at 1.2, and takes the mean over samples of the mean over their tokens
    assert loss_of(GRPO(proximal="inference")) == pytest.approx(-((1.2 + 1) / 2 - 0.8) / 2)
    assert loss_of(DAPO(proximal="inference")) == pytest.approx(-(1.28 + 1 - 0.8) / 3)
    # clipped tokens have no gradient; the one in between has -A r = -1, a third of it
    assert gradient_of(DAPO(proximal="inference")) == pytest.approx([0, -1 / 3, 0])


def test_dr_grpo() -> None:
    # A = (0.5, -0.5). Tokens: 0.5 * 1.2 = 0.6; 0.5; min(-0.25, -0.4) = -0.4; sums 1.1 and -0.4
    algorithm = DrGRPO(proximal="inference")
    assert loss_of(algorithm) == pytest.approx(-(1.1 - 0.4) / 2)
    normed = DrGRPO(proximal="inference", loss_aggregation="sample_sum_norm", norm_tokens=10)
    assert loss_of(normed) == pytest.approx(-(1.1 - 0.4) / 20)


def test_gspo() -> None:
    # s = (sqrt(2 * 1), 0.5), clipped to 1.0004 and 0.9997; A = (1, -1)
    assert loss_of(GSPO(proximal="inference")) == pytest.approx(-(1.0004 - 0.9997) / 2)
    # with wide bounds nothing is clipped: -(sqrt 2 - 0.5) / 2
    wide = GSPO(proximal="inference", clip_low=1.0, clip_high=1.0)
    assert loss_of(wide) == pytest.approx(-(sqrt(2) - 0.5) / 2)
    # d s_0 / d log pi_t = s_0 / 2 for both tokens; d s_1 / d log pi = s_1
    assert gradient_of(wide) == pytest.approx([-sqrt(2) / 4, -sqrt(2) / 4, 0.25])


def test_cispo() -> None:
    # weights min(2, 1.28), 1, 0.5, without gradient; A = (1, 1, -1)
    expected = -(1.28 * log(0.8) + log(0.5) - 0.5 * log(0.25)) / 3
    assert loss_of(CISPO(proximal="inference")) == pytest.approx(expected)
    expected_gradient = [-1.28 / 3, -1 / 3, 0.5 / 3]
    assert gradient_of(CISPO(proximal="inference")) == pytest.approx(expected_gradient)


def test_rloo() -> None:
    # others' means: 0.25, 0.75, 0.5
    advantages = flat_advantages(RLOO(), [plain_group([1.0, 0.0, 0.5])])
    assert advantages == pytest.approx([0.75, -0.75, 0.0])
    # A = (1, -1). Tokens: 1.2, 1, -0.8; sums 2.2 and -0.8
    assert loss_of(RLOO(proximal="inference")) == pytest.approx(-(2.2 - 0.8) / 2)
    # the whole sample as one action: ratios 2 and 0.5, clipped to 1.2 and 0.8, at each token
    whole = RLOO(proximal="inference", ratio_level="sample_sum", loss_aggregation="sample_mean")
    assert loss_of(whole) == pytest.approx(-(1.2 - 0.8) / 2)


def test_reinforce_pp() -> None:
    # three tokens with returns 1, 1, 0: mean 2/3, variance 2/9
    expected = [1 / sqrt(2), 1 / sqrt(2), -sqrt(2)]
    assert flat_advantages(ReinforcePP(), [PAIR]) == pytest.approx(expected)
    # the group's mean first: returns 0.5, 0.5, -0.5: mean 1/6, variance 1/4 - 1/36 = 2/9
    with_baseline = flat_advantages(ReinforcePP(baseline="group_mean"), [PAIR])
    assert with_baseline == pytest.approx(expected)


def test_reinforce_pp_with_a_baseline_over_several_groups() -> None:
    # less the groups' means: -0.5, 0.5 and -1.5, 1.5: mean 0, variance (0.5 + 4.5) / 4 = 1.25
    batch = [plain_group([0, 1], "g0"), plain_group([0, 3], "g1")]
    values = flat_advantages(ReinforcePP(baseline="group_mean"), batch)
    assert values == pytest.approx([x / sqrt(1.25) for x in (-0.5, 0.5, -1.5, 1.5)])


def test_reinforce_pp_with_the_divergence_in_the_reward() -> None:
    # ref = inference / e^d with d = 1, 2, 4: k1 = 1, 2, 4. With coefficient 0.1 the returns are
    # 1 - 0.3 = 0.7, 1 - 0.2 = 0.8, 0 - 0.4 = -0.4: mean 11/30, variance (0.49 + 0.64 + 0.16)/3
    # - (11/30)^2 = 0.43 - 0.134444 = 0.295556
    ref = [t - d for t, d in zip(THEN, (1, 2, 4), strict=True)]
    values = flat_advantages(ReinforcePP(kl_coef=0.1), [PAIR], {"ref_logprobs": ref})
    std = sqrt(0.43 - 121 / 900)
    assert values == pytest.approx([(x - 11 / 30) / std for x in (0.7, 0.8, -0.4)], abs=1e-5)


def test_the_divergence_in_the_reward_of_a_group() -> None:
    # k1 sums 1 + 2 = 3 and 4: rewards 1 - 0.3 and 0 - 0.4, mean 0.15, std 0.55
    ref = [t - d for t, d in zip(THEN, (1, 2, 4), strict=True)]
    algorithm = GRPO(kl_coef=0.1, kl_in="reward", kl_estimator="k1", normalise="none")
    values = flat_advantages(algorithm, [PAIR], {"ref_logprobs": ref})
    assert values == pytest.approx([0.55, 0.55, -0.55])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # the log ratio l = log(ref / pi) is log 2, log 1, log 0.5
    [
        ("k1", (-log(2), 0.0, log(2))),
        ("k2", (log(2) ** 2 / 2, 0.0, log(2) ** 2 / 2)),
        ("k3", (2 - log(2) - 1, 0.0, 0.5 + log(2) - 1)),
    ],
)
def test_the_divergence_in_the_loss(estimator: str, expected: tuple[float, ...]) -> None:
    ref = (log(1.6), log(0.5), log(0.125))
    options = {"proximal": "inference", "kl_coef": 0.3, "kl_estimator": estimator}
    with_kl = loss_of(DAPO(**options), ref_logprobs=ref)
    without = loss_of(DAPO(proximal="inference"))
    assert with_kl - without == pytest.approx(0.3 * sum(expected) / 3, abs=1e-7)


def test_ppo_advantages_and_returns() -> None:
    one = [group([trajectory(1.0, (2,))])]
    values = {"values": (0.5, 0.25)}
    # delta_1 = 1 - 0.25 = 0.75, delta_0 = 0.25 - 0.5 = -0.25; with lambda 1 the sums are 0.75, 0.5
    plain = PPO(normalise="none")
    assert flat_advantages(plain, one, values) == pytest.approx([0.5, 0.75])
    # discount 0.9, lambda 0.5: delta_0 = 0.225 - 0.5 = -0.275; A_0 = -0.275 + 0.45 * 0.75
    shorter = PPO(normalise="none", discount=0.9, gae_lambda=0.5)
    assert flat_advantages(shorter, one, values) == pytest.approx([0.0625, 0.75])
    case = Case(shorter, one, values)
    returns = case.batch.signals["returns"][case.batch.loss_mask]
    assert returns.tolist() == pytest.approx([0.5625, 1.0])


def test_ppo_steps_over_what_the_environment_wrote_and_counts_turns() -> None:
    # two turns of two tokens that earn 1 and 2; values 0: A is the discounted sum of what follows
    two = [group([trajectory(3.0, (2, 2), earned=(1.0, 2.0))])]
    zero = {"values": (0.0,) * 4}
    by_turn = PPO(normalise="none", credit="turn", discount=0.5, discount_unit="turn")
    # inside a turn nothing is discounted: 1 + 0.5 * 2 = 2, and 2
    assert flat_advantages(by_turn, two, zero) == pytest.approx([2, 2, 2, 2])
    by_token = PPO(normalise="none", credit="turn", discount=0.5)
    # 0 + (1 + (0 + 2/2)/2)/2 = 0.75; 1 + (0 + 2/2)/2 = 1.5; 1; 2
    assert flat_advantages(by_token, two, zero) == pytest.approx([0.75, 1.5, 1, 2])


def with_a_sub_agent(*earned: float) -> Group:
    """Return a group of one: an agent has turns 0 and 2, of two tokens, its sub-agent turn 1."""
    whole = trajectory(sum(earned), (2, 2, 2), earned=earned)
    return group([replace(whole, samples=(sample([2, 0, 2]), sample([0, 2])))])


@pytest.mark.parametrize(
    ("earned", "expected"),
    # tokens of turns 0, 0, 2, 2 and 1, 1: what their turn and those after it earned
    [
        ((0.0, 1.0, 0.0), [1, 1, 0, 0, 1, 1]),
        ((0.0, 0.0, 1.0), [1, 1, 1, 1, 1, 1]),
        ((1.0, 2.0, 4.0), [7, 7, 4, 4, 6, 6]),
    ],
)
def test_ppo_credits_the_turns_of_a_sub_agent_when_they_were(
    earned: tuple[float, ...], expected: list[float]
) -> None:
    algorithm = PPO(normalise="none", credit="turn")
    values = flat_advantages(algorithm, [with_a_sub_agent(*earned)], {"values": [0.0] * 6})
    assert values == pytest.approx(expected)


def test_ppo_looks_from_an_agent_to_its_sub_agent_and_back() -> None:
    # values 0, the reward on the last token of turn 2: 0.9 for each token between, in time
    algorithm = PPO(normalise="none", gae_lambda=0.9)
    batch = [with_a_sub_agent(0.0, 0.0, 1.0)]
    values = flat_advantages(algorithm, batch, {"values": [0.0] * 6})
    assert values == pytest.approx([0.9**5, 0.9**4, 0.9, 1, 0.9**3, 0.9**2])
    # by turns: 0.9 for each that ends between
    by_turn = PPO(normalise="none", gae_lambda=0.9, discount_unit="turn")
    values = flat_advantages(by_turn, batch, {"values": [0.0] * 6})
    assert values == pytest.approx([0.81, 0.81, 1, 1, 0.9, 0.9])
    # values 1 to 6 in time: with lambda 0 what is learned is the next one, and 1 at the end
    one_step = PPO(normalise="none", gae_lambda=0.0)
    case = Case(one_step, batch, {"values": (1.0, 2.0, 5.0, 6.0, 3.0, 4.0)})
    returns = case.batch.signals["returns"][case.batch.loss_mask]
    assert returns.tolist() == pytest.approx([2, 3, 6, 1, 4, 5])


def test_reinforce_pp_subtracts_what_diverges_later_in_time() -> None:
    # k1 of 1 to 6 in time; 0 less the sums of those from each on: -21, -20, -11, -6; -18, -15
    ref = [-1.0 - k for k in (1, 2, 5, 6, 3, 4)]
    batch = [with_a_sub_agent(0.0, 0.0, 0.0)]
    values = flat_advantages(ReinforcePP(kl_coef=1.0), batch, {"ref_logprobs": ref})
    returns = np.array([-21, -20, -11, -6, -18, -15])
    assert values == pytest.approx(((returns - returns.mean()) / returns.std()).tolist())


def test_ppo_critic() -> None:
    one = [group([trajectory(1.0, (2,), inference=(log(0.5), log(0.5)))])]
    case = Case(PPO(proximal="inference"), one, {"values": (0.5, 0.25)})
    now = torch.tensor([0.6, 0.9], dtype=torch.float64)
    # advantages 0.5 and 0.75 are normalised to -1 and 1: with ratio 1 they cancel.
    # returns 1, 1. First: (0.6 - 1)^2 = 0.16, within the clip. Second: 0.9 is 0.65 away from 0.25,
    # so it counts as 0.45: (0.45 - 1)^2 = 0.3025 > 0.01. Half of both, mean over tokens, times 0.5
    loss, metrics = case.loss(logs((0.5, 0.5)), {"values": now})
    assert float(loss) == pytest.approx(0.5 * (0.16 + 0.3025) / 2 / 2)
    assert float(metrics["value_clip_fraction"]) == 1
    assert float(metrics["value_loss"]) == pytest.approx((0.16 + 0.3025) / 2)


def test_gigpo() -> None:
    # discount 0.5: returns of turns (0.5, 1) and (0, 0). Both began in a, and were in b after it.
    alike = group(
        [
            trajectory(1.0, (1, 1), states=("a", "b")),
            trajectory(0.0, (1, 1), states=("a", "b")),
        ]
    )
    plain = GiGPO(discount=0.5, normalise="none")
    # A^E = (0.5, -0.5); A^S in a = (0.25, -0.25), in b = (0.5, -0.5)
    assert flat_advantages(plain, [alike]) == pytest.approx([0.75, 1.0, -0.75, -1.0])
    # all divided by their standard deviations, which are as large: 1 + 1
    assert flat_advantages(GiGPO(discount=0.5), [alike]) == pytest.approx([2, 2, -2, -2])


def test_gigpo_meets_a_state_twice_and_once() -> None:
    # the first is in a twice: returns 0.5 and 1; the second is in a (0), then in c, alone
    differing = group(
        [
            trajectory(1.0, (1, 1), states=("a", "a")),
            trajectory(0.0, (1, 1), states=("a", "c")),
        ]
    )
    algorithm = GiGPO(discount=0.5, normalise="none", step_weight=2.0)
    # in a: mean 0.5, so 0, 0.5, -0.5; c: 0. Doubled, and added to 0.5, 0.5, -0.5, -0.5
    assert flat_advantages(algorithm, [differing]) == pytest.approx([0.5, 1.5, -1.5, -0.5])


def test_topr() -> None:
    # A = (0.5, -0.5). The first is not weighted; the second has ratio 0.25 / 0.5
    expected = -(0.5 * (log(0.8) + log(0.5)) - 0.5 * 0.5 * log(0.25)) / 2
    assert loss_of(TOPR()) == pytest.approx(expected)
    assert gradient_of(TOPR()) == pytest.approx([-0.25, -0.25, 0.125])
    # a good sample that became unlikelier is learned with weight 1, not 0.25 / 0.5
    good = group([trajectory(1.0, (1,), inference=(log(0.5),))])
    assert float(Case(TOPR(), [good]).loss(logs((0.25,)))[0]) == pytest.approx(-0.5 * log(0.25))
    # a bad sample that became likelier is pushed down with weight 1, not 0.9 / 0.5
    bad = group([trajectory(0.0, (1,), inference=(log(0.5),))])
    case = Case(TOPR(), [bad])
    assert float(case.loss(logs((0.9,)))[0]) == pytest.approx(0.5 * log(0.9))


def test_raft_pp() -> None:
    # only the first is trained on: (1.2 + 1) / 2 of its two tokens; both samples count
    assert flat_advantages(RAFTPP(), [PAIR]) == [1, 1, 0]
    case = Case(RAFTPP(proximal="inference"), [PAIR])
    assert float(case.loss(logs(NOW[:2]))[0]) == pytest.approx(-1.1 / 2)
    dropped = Case(RAFTPP(proximal="inference", zero_advantage="drop"), [PAIR])
    assert float(dropped.loss(logs(NOW[:2]))[0]) == pytest.approx(-1.1)
    assert flat_advantages(RAFTPP(), [plain_group([1, 1])]) == [0, 0]
    assert flat_advantages(RAFTPP(least_reward=1.0), [plain_group([1, 1, 0])]) == [1, 1, 0]


def test_starpo() -> None:
    # means over the tokens of each trajectory: (1.28 + 1) / 2 and -0.8
    assert loss_of(StarPO(proximal="inference")) == pytest.approx(-(1.14 - 0.8) / 2)


def rewritten() -> Group:
    """Return a group whose first member has two samples, of one and three tokens."""
    whole = trajectory(1.0, (4,), inference=[log(0.5)] * 4)
    first, second = sample([1], [log(0.5)]), sample([3], [log(0.5)] * 3)
    return group(
        [replace(whole, samples=(first, second)), trajectory(0.0, (2,), inference=[log(0.5)] * 2)]
    )


def test_a_trajectory_whose_context_was_rewritten_counts_once() -> None:
    # ratios 1; 1.2, 1.2, 1.2; and 0.9, 0.9: means of trajectories (1 + 3.6) / 4 and -0.9
    now = logs((0.5, 0.6, 0.6, 0.6, 0.45, 0.45))
    whole = Case(StarPO(proximal="inference"), [rewritten()]).loss(now)[0]
    assert float(whole) == pytest.approx(-(1.15 - 0.9) / 2)
    # and of samples 1, 1.2 and -0.9
    by_sample = StarPO(proximal="inference", loss_aggregation="sample_mean")
    loss = Case(by_sample, [rewritten()]).loss(now)[0]
    assert float(loss) == pytest.approx(-(1 + 1.2 - 0.9) / 3)


def test_ppo_looks_over_the_edges_of_samples() -> None:
    values = {"values": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}
    algorithm = PPO(normalise="none", discount=0.9, gae_lambda=0.8)
    in_two = flat_advantages(algorithm, [rewritten()], values)
    plain = group([trajectory(1.0, (4,)), trajectory(0.0, (2,))])
    assert in_two == pytest.approx(flat_advantages(algorithm, [plain], values))


def test_starpo_leaves_out_the_groups_it_is_certain_of() -> None:
    batch = [plain_group([0.5, 0.6], "g0"), plain_group([0.0, 1.0], "g1")]
    assert flat_advantages(StarPO(keep_groups=0.5), batch) == [0, 0, -1, 1]


def test_sft() -> None:
    assert loss_of(SFT()) == pytest.approx(-(log(0.8) + log(0.5) + log(0.25)) / 3)
    by_sample = SFT(loss_aggregation="sample_mean")
    assert loss_of(by_sample) == pytest.approx(-((log(0.8) + log(0.5)) / 2 + log(0.25)) / 2)
    assert flat_advantages(SFT(least_reward=1.0), [PAIR]) == [1, 1, 0]


def test_on_policy_distillation() -> None:
    # the teacher gives 0.8, 0.25, 0.75: advantages log 2, -log 2, log 1.5
    teacher = {"teacher_logprobs": (log(0.8), log(0.25), log(0.75))}
    algorithm = OnPolicyDistillation(proximal="inference")
    advantages = flat_advantages(algorithm, [PAIR], teacher)
    assert advantages == pytest.approx([log(2), -log(2), log(1.5)])
    # ratios 2 (held at 1.2), 1 and 0.5
    loss = Case(algorithm, [PAIR], teacher).loss(logs(NOW))[0]
    assert float(loss) == pytest.approx(-(1.2 * log(2) - log(2) + log(1.5) / 2) / 3)
    # and the reward less its group's mean, 0.5 and -0.5
    both = flat_advantages(OnPolicyDistillation(reward_coef=2.0), [PAIR], teacher)
    assert both == pytest.approx([log(2) + 1, -log(2) + 1, log(1.5) - 1])


def test_credit_by_turn() -> None:
    # discount 0.5: returns (0.5, 1) and (1, 0). First turns: mean 0.75, std 0.25; second: 0.5, 0.5
    members = group(
        [
            trajectory(1.0, (2, 1), earned=(0.0, 1.0)),
            trajectory(1.0, (1, 2), earned=(1.0, 0.0)),
        ]
    )
    algorithm = GRPO(credit="turn", discount=0.5)
    assert flat_advantages(algorithm, [members]) == pytest.approx([-1, -1, 1, 1, -1, -1])


def test_a_member_that_had_ended_earned_nothing_more() -> None:
    # returns (1, 1) and (0,): first turns 1, 0; second 1 and nothing
    members = group([trajectory(1.0, (1, 1)), trajectory(0.0, (1,))])
    algorithm = GRPO(credit="turn", normalise="none")
    assert flat_advantages(algorithm, [members]) == pytest.approx([0.5, 0.5, -0.5])


def test_normalisation_over_the_batch() -> None:
    # rewards 0, 1 and 0, 3: mean 1, variance (1 + 0 + 1 + 4) / 4 = 1.5; Bessel: 6 / 3 = 2
    batch = [plain_group([0, 1], "g0"), plain_group([0, 3], "g1")]
    centred = [-0.5, 0.5, -1.5, 1.5]
    by_batch = flat_advantages(GRPO(normalise="batch_std"), batch)
    assert by_batch == pytest.approx([x / sqrt(1.5) for x in centred])
    corrected = flat_advantages(GRPO(normalise="batch_std", std_correction=1), batch)
    assert corrected == pytest.approx([x / sqrt(2) for x in centred])


def test_corrections_of_what_another_policy_sampled() -> None:
    # proximal 0.8, 0.25, 0.5 against 0.4, 0.5, 0.5: weights 2, 0.5, 1; of the first sample 1.
    # ratios are 1 when the trainer is the proximal policy; A = (1, 1, -1)
    proximal = (0.8, 0.25, 0.5)

    def tokens(**options: object) -> float:
        signals = {"proximal_logprobs": tuple(math.log(p) for p in proximal)}
        case = Case(DAPO(**options), [PAIR], signals, policy_version=2)
        return -3 * float(case.loss(logs(proximal))[0])

    assert tokens(importance_correction="none") == pytest.approx(1 + 1 - 1)
    assert tokens(tis_cap=1.5) == pytest.approx(1.5 + 0.5 - 1)
    assert tokens(importance_correction="token_mask", mask_floor=0.6) == pytest.approx(2 - 1)
    narrow = tokens(importance_correction="token_mask", tis_cap=1.5, mask_floor=0.4)
    assert narrow == pytest.approx(0.5 - 1)
    assert tokens(importance_correction="sequence_truncate") == pytest.approx(1 + 1 - 1)
    by_sequence = tokens(importance_correction="sequence_mask", mask_floor=0.1, tis_cap=0.99)
    assert by_sequence == pytest.approx(0, abs=1e-6)
    # two versions stale: every token counts a quarter
    stale = tokens(importance_correction="none", staleness_discount=0.5)
    assert stale == pytest.approx(0.25)


def test_a_second_clip_bounds_what_a_bad_token_costs() -> None:
    # ratio 0.8 / 0.1 = 8 with A = -1 (and one like it with A = 1, ratio 1): -3 in place of -8
    members = group(
        [trajectory(0.0, inference=(log(0.1),)), trajectory(1.0, inference=(log(0.5),))]
    )
    case = Case(GRPO(proximal="inference", dual_clip=3.0), [members])
    loss, metrics = case.loss(logs((0.8, 0.5)))
    assert float(loss) == pytest.approx(-(-3 + 1) / 2)
    assert float(metrics["clip_fraction"]) == 1


def test_effective_sample_size_can_be_made_of_the_metrics() -> None:
    # weights min(2, 2), 0.5, 1: sums 3.5 and 5.25; (3.5)^2 / 5.25 = 2.333 of 3 tokens
    signals = {"proximal_logprobs": (log(0.8), log(0.25), log(0.5))}
    _, metrics = Case(GRPO(), [PAIR], signals).loss(logs((0.8, 0.25, 0.5)))
    assert float(metrics["is_weight_mean"]) == pytest.approx(3.5)
    assert float(metrics["is_weight_sq_mean"]) == pytest.approx(5.25)
