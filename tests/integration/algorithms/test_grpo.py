"""GRPO by hand, by its symmetries, and by finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollart_algorithms.grpo import GRPO
from rollart_core.contracts.algorithm import LossBatch
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory

TASK = Task("test/Env-v1", "train", 0, 0)
rewards_strategy = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=8)


def sample(mask: list[int]) -> Sample:
    m = np.array(mask, dtype=bool)
    zeros = np.zeros(len(m), dtype=np.int32)
    return Sample(zeros, m, zeros.astype(np.float32), zeros, zeros)


def group(rewards: list[float], mask: tuple[int, ...] = (0, 1, 1)) -> Group:
    members = [
        Trajectory(Ticket(f"g.{i}", TASK, "g", i), "finished", (sample(list(mask)),), reward=r)
        for i, r in enumerate(rewards)
    ]
    return Group("g", TASK, tuple(members), len(rewards))


def batch(advantages: list[float], inference: list[float], **changes: object) -> LossBatch:
    n = len(advantages)
    fields = {
        "loss_mask": torch.ones(n, dtype=torch.bool),
        "advantages": torch.tensor(advantages),
        "inference_logprobs": torch.tensor(inference),
        "sample_ids": torch.zeros(n, dtype=torch.int64),
        "staleness": torch.zeros(n, dtype=torch.int64),
        "total_loss_tokens": n,
        "total_samples": 1,
    }
    return LossBatch(**{**fields, **changes})


def member_advantages(algorithm: GRPO, rewards: list[float]) -> list[float]:
    return [float(row[1]) for row in algorithm.advantages([group(rewards)], {})]


def test_advantages_by_hand() -> None:
    # mean 0.5, population standard deviation 0.5
    rows = GRPO().advantages([group([0.0, 1.0, 1.0, 0.0], mask=(0, 1, 0))], {})
    assert [row.tolist() for row in rows] == [[0, -1, 0], [0, 1, 0], [0, 1, 0], [0, -1, 0]]


def test_without_normalising_advantages_are_centred_rewards() -> None:
    assert member_advantages(GRPO(normalise="none"), [0.0, 1.0, 0.5]) == [-0.5, 0.5, 0.0]


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert member_advantages(GRPO(), [0.1] * 7) == [0.0] * 7
    assert member_advantages(GRPO(normalise="none"), [0.1] * 7) == [0.0] * 7


@given(rewards_strategy, st.floats(-5, 5), st.floats(0.5, 5))
@settings(max_examples=25, deadline=None)
def test_advantages_ignore_shift_and_scale(
    rewards: list[float], shift: float, scale: float
) -> None:
    moved = member_advantages(GRPO(), [shift + scale * r for r in rewards])
    assert moved == pytest.approx(member_advantages(GRPO(), rewards), abs=2e-3)


@given(rewards_strategy, st.randoms())
@settings(max_examples=25, deadline=None)
def test_advantages_follow_their_members(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = member_advantages(GRPO(), [rewards[i] for i in order])
    plain = member_advantages(GRPO(), rewards)
    assert moved == pytest.approx([plain[i] for i in order], abs=1e-5)
    assert sum(plain) == pytest.approx(0, abs=1e-4)


def test_loss_by_hand_with_both_clips_against_the_sampling_policy() -> None:
    algorithm = GRPO(proximal="inference", clip_high=0.28)
    # ratios 2, 2, 0.5, 0.5 with advantages +1, -1, +1, -1
    logprobs = torch.tensor([2.0, 2.0, 0.5, 0.5]).log()
    loss, metrics = algorithm.loss(logprobs, batch([1.0, -1.0, 1.0, -1.0], [0.0] * 4))
    assert float(loss) == pytest.approx(-(1.28 - 2.0 + 0.5 - 0.8) / 4)
    assert float(metrics["clip_fraction"]) == 2
    assert float(metrics["is_ratio_max"]) == 2
    assert float(metrics["is_ratio_mean"]) == 5  # a sum
    assert float(metrics["approx_kl"]) == pytest.approx(
        2 * (1 - math.log(2)) + 2 * (math.log(2) - 0.5)
    )


def test_truncated_importance_sampling_by_hand() -> None:
    algorithm = GRPO(tis_cap=1.5)
    proximal, inference = torch.tensor([0.8, 0.1]).log(), torch.tensor([0.2, 0.2]).log()
    loss, _ = algorithm.loss(
        proximal.clone(),
        batch([1.0, 1.0], inference.tolist(), signals={"proximal_logprobs": proximal}),
    )
    assert float(loss) == pytest.approx(-(1.5 + 0.5) / 2)  # weights min(4, 1.5) and 0.5, ratio 1


def test_the_importance_weight_has_no_gradient_of_its_own() -> None:
    logprobs = torch.tensor([0.4]).log().requires_grad_()
    part = batch([1.0], [math.log(0.5)], signals={"proximal_logprobs": logprobs})
    GRPO().loss(logprobs, part)[0].backward()
    # ratio is constant 1 here: both its logprobs are the same tensor
    assert logprobs.grad is not None
    assert float(logprobs.grad) == 0


def test_kl_by_hand() -> None:
    algorithm = GRPO(proximal="inference", kl_coef=0.5)
    ref = torch.tensor([0.2]).log()
    part = batch([0.0], [math.log(0.4)], signals={"ref_logprobs": ref})
    loss, metrics = algorithm.loss(torch.tensor([0.4]).log(), part)
    assert float(metrics["ref_kl"]) == pytest.approx(0.5 - math.log(0.5) - 1)
    assert float(loss) == pytest.approx(0.5 * (0.5 - math.log(0.5) - 1))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", -(1 + 1 + 1 + 3) / 4),
        ("sample_mean", -(1 + 3) / 2),
        ("sample_sum", -(3 + 3) / 2),
    ],
)
def test_loss_aggregation_by_hand(aggregation: str, expected: float) -> None:
    ids = torch.tensor([0, 0, 0, 1])
    part = batch([1.0, 1.0, 1.0, 3.0], [0.0] * 4, sample_ids=ids, total_samples=2)
    loss, _ = GRPO(proximal="inference", loss_aggregation=aggregation).loss(torch.zeros(4), part)
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "sample_sum"])
def test_masked_tokens_reach_neither_loss_nor_gradient_nor_metrics(aggregation: str) -> None:
    algorithm = GRPO(proximal="inference", loss_aggregation=aggregation)
    mask = torch.tensor([True, False, True])
    results = []
    for junk in (0.0, 50.0):
        logprobs = torch.tensor([-0.5, -junk, -1.0], requires_grad=True)
        part = batch([1.0, junk, -2.0], [-0.6, junk, -0.9], loss_mask=mask, total_loss_tokens=2)
        loss, metrics = algorithm.loss(logprobs, part)
        loss.backward()
        assert logprobs.grad is not None
        numbers = {name: float(value) for name, value in metrics.items()}
        results.append((loss.item(), logprobs.grad.tolist(), numbers))
    assert results[0] == results[1]
    assert results[0][1][1] == 0


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "sample_sum"])
def test_shares_of_microbatches_add_up(aggregation: str) -> None:
    algorithm = GRPO(proximal="inference", loss_aggregation=aggregation)
    logprobs, ids = torch.tensor([-0.5, -0.1, -1.0]), torch.tensor([0, 0, 1])
    values, inference = [1.0, 1.0, -2.0], [-0.6, -0.2, -0.9]

    def share(chosen: list[int]) -> float:
        part = batch(
            [values[i] for i in chosen],
            [inference[i] for i in chosen],
            sample_ids=ids[chosen],
            total_loss_tokens=3,
            total_samples=2,
        )
        return float(algorithm.loss(logprobs[chosen], part)[0])

    assert share([0, 1]) + share([2]) == pytest.approx(share([0, 1, 2]))


def test_gradient_by_finite_differences() -> None:
    algorithm = GRPO(kl_coef=0.1, loss_aggregation="sample_mean")
    generator = torch.Generator().manual_seed(0)

    def rand() -> torch.Tensor:
        return torch.rand(6, generator=generator, dtype=torch.float64)

    part = batch([0.0] * 6, [0.0] * 6, sample_ids=torch.arange(6) // 3, total_samples=3)
    part.advantages, part.inference_logprobs = rand() * 2 - 1, -rand()
    part.loss_mask = torch.arange(6) % 3 != 0
    part.signals = {"proximal_logprobs": -rand(), "ref_logprobs": -rand()}
    start = (-rand()).requires_grad_()
    algorithm.loss(start, part)[0].backward()
    moves = torch.eye(6, dtype=torch.float64) * 1e-6
    with torch.no_grad():
        slopes = [
            (algorithm.loss(start + m, part)[0] - algorithm.loss(start - m, part)[0]) / 2e-6
            for m in moves
        ]
    assert start.grad is not None
    # not torch.testing: importing it takes seconds
    assert start.grad.tolist() == pytest.approx([float(s) for s in slopes], rel=1e-6, abs=1e-8)
    assert int(start.grad.count_nonzero()) >= 3


def test_what_is_required_follows_from_the_config() -> None:
    assert GRPO().requires == {"proximal_logprobs"}
    assert GRPO(proximal="inference").requires == frozenset()
    assert GRPO(proximal="inference", kl_coef=0.1).requires == {"ref_logprobs"}


def test_zero_advantage_samples_are_only_skipped_where_they_teach_nothing() -> None:
    assert GRPO().zero_advantage == "skip"
    assert GRPO(zero_advantage="drop").zero_advantage == "drop"
    assert GRPO(kl_coef=0.1).zero_advantage == "train"
    assert GRPO(entropy_coef=0.1).zero_advantage == "train"
    assert GRPO(kl_coef=0.1, kl_in="reward").zero_advantage == "skip"


def test_a_key_without_effect_is_refused() -> None:
    with pytest.raises(ValidationError, match="tis_cap has no effect"):
        GRPO(proximal="inference", tis_cap=2.0)
    with pytest.raises(ValidationError, match="clip_hihg"):
        GRPO(clip_hihg=0.3)
