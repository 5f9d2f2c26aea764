"""What holds for every algorithm of ours: symmetries, masks, shares, gradients, odd batches."""

import importlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.algorithm_cases import Case, flat_advantages, gradient, group, slopes, trajectory

from rollart_core.contracts.algorithm import Algorithm
from rollart_core.plugins.manifest import read_manifest
from rollart_core.types import Group
from rollart_testing import assert_checks, check_algorithm

ENTRY_POINTS = {
    spec.alias: spec.entry_point for spec in read_manifest("rollart_algorithms").specs["algorithms"]
}
COUNT_BY_REWARD = sorted(set(ENTRY_POINTS) - {"sft", "opd"})
SCALED = {"dr-grpo", "rloo", "topr"}
"""Their advantages grow with the rewards; the others' do not."""
AGGREGATIONS = ("token_mean", "sample_mean", "sample_sum", "sample_sum_norm", "trajectory_mean")

rewards_strategy = st.lists(
    st.integers(-40, 40).map(lambda x: x / 8), min_size=2, max_size=6
).filter(lambda rewards: max(rewards) > min(rewards))


def make(alias: str, **options: object) -> Algorithm:
    module, _, name = ENTRY_POINTS[alias].partition(":")
    made = getattr(importlib.import_module(module), name)(**options)
    assert isinstance(made, Algorithm)
    return made


def centred(alias: str) -> Algorithm:
    """Return it with a baseline that moves with the rewards, where there is a choice."""
    return make(alias, **({"baseline": "group_mean"} if alias == "topr" else {}))


def signals(algorithm: Algorithm, groups: list[Group], seed: int = 0) -> dict[str, list[float]]:
    """Return random signals, a number for each sampled token."""
    random = np.random.default_rng(seed)
    count = sum(s.num_loss_tokens for g in groups for s in g.samples)
    return {
        name: (random.normal(size=count) if name == "values" else -random.random(count)).tolist()
        for name in sorted(algorithm.requires)
    }


def values_of(algorithm: Algorithm, groups: list[Group]) -> list[float]:
    return flat_advantages(algorithm, groups, signals(algorithm, groups))


ROWS = ("token_ids", "loss_mask", "inference_logprobs", "policy_versions", "turn_ids")


def in_branches(whole: Group, branches: list[list[int]]) -> Group:
    """Return the same group with its first member's turns in a sample for each branch."""
    first, *others = whole.trajectories
    (row,) = first.samples
    kept = [~row.loss_mask | np.isin(row.turn_ids, turns) for turns in branches]
    samples = (replace(row, **{name: getattr(row, name)[at] for name in ROWS}) for at in kept)
    return replace(whole, trajectories=(replace(first, samples=tuple(samples)), *others))


def one_turn(rewards: list[float]) -> list[Group]:
    return [group([trajectory(r, (2,)) for r in rewards])]


@pytest.mark.parametrize("alias", sorted(ENTRY_POINTS))
def test_it_keeps_its_contract(alias: str) -> None:
    assert_checks(check_algorithm(make(alias)))


@pytest.mark.parametrize("alias", COUNT_BY_REWARD)
@given(rewards_strategy, st.integers(-24, 24), st.sampled_from([0.5, 2.0, 3.0]))
@settings(max_examples=15, deadline=None)
def test_advantages_ignore_the_shift_of_rewards_and_follow_their_scale(
    alias: str, rewards: list[float], shift: int, scale: float
) -> None:
    if alias == "ppo":  # its values do not move with the rewards: only the shift is ignored
        scale = 1.0
    algorithm = centred(alias)
    plain = values_of(algorithm, one_turn(rewards))
    moved = values_of(algorithm, one_turn([shift / 8 + scale * r for r in rewards]))
    expected = [x * (scale if alias in SCALED else 1.0) for x in plain]
    assert moved == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("alias", COUNT_BY_REWARD)
@given(rewards_strategy, st.randoms())
@settings(max_examples=10, deadline=None)
def test_advantages_follow_their_members(alias: str, rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    algorithm = centred(alias)

    def per_member(given: list[float]) -> list[float]:
        batch = [group([trajectory(r) for r in given])]
        constant = {name: [0.25] * len(given) for name in algorithm.requires}
        return flat_advantages(algorithm, batch, constant)

    plain = per_member(rewards)
    assert per_member([rewards[i] for i in order]) == pytest.approx(
        [plain[i] for i in order], abs=1e-5
    )


@pytest.mark.parametrize("branches", [[[0, 2], [1, 3]], [[0, 3], [2], [1]], [[1], [], [0, 2, 3]]])
@pytest.mark.parametrize(
    ("alias", "options"),
    [
        *((alias, {}) for alias in sorted(ENTRY_POINTS)),
        ("ppo", {"credit": "turn", "gae_lambda": 0.9, "discount": 0.8, "kl_coef": 0.1}),
        ("ppo", {"credit": "turn", "discount": 0.8, "discount_unit": "turn"}),
        ("ppo", {"gae_lambda": 0.9, "normalise": "none"}),
        ("reinforce++", {"kl_coef": 0.1}),
        ("reinforce++", {"kl_coef": 0.1, "baseline": "group_mean"}),
        ("grpo", {"credit": "turn", "discount": 0.8, "kl_coef": 0.1, "kl_in": "reward"}),
        ("gigpo", {"kl_coef": 0.1, "kl_in": "reward"}),
        ("topr", {"credit": "turn", "discount": 0.8}),
    ],
)
def test_advantages_are_those_of_turns_whichever_sample_they_are_in(
    alias: str, options: dict[str, object], branches: list[list[int]]
) -> None:
    turns, logprobs = (2, 1, 3, 1), [-0.3, -0.7, -1.1, -0.2, -0.9, -0.6, -0.4]
    first = trajectory(3.0, turns, earned=(0.5, 1.0, 0.0, 1.5), inference=logprobs)
    whole = group([first, trajectory(1.0, (2, 1), earned=(1.0, 0.0))])
    parted = in_branches(whole, branches)
    algorithm = make(alias, **options)
    # Where each token of the branches is in the whole: the three of the other member stay.
    turn_ids = np.repeat(np.arange(4), turns)
    order = [*np.concatenate([np.flatnonzero(np.isin(turn_ids, b)) for b in branches]), 7, 8, 9]
    given = signals(algorithm, [whole])
    moved = {name: np.array(flat)[order].tolist() for name, flat in given.items()}
    expected = np.array(flat_advantages(algorithm, [whole], given))[order]
    assert flat_advantages(algorithm, [parted], moved) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("alias", sorted(set(COUNT_BY_REWARD) - {"ppo", "raft++"}))
def test_advantages_of_a_group_sum_to_nothing(alias: str) -> None:
    assert sum(values_of(centred(alias), one_turn([1, 0, 0.25, 3]))) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("alias", "options"),
    [
        ("reinforce++", {"baseline": "group_mean"}),
        ("topr", {"baseline": "group_mean"}),
        ("opd", {"reward_coef": 1.0}),
    ],
)
def test_options_that_compare_siblings_refuse_a_batch_without_any(
    alias: str, options: dict[str, object]
) -> None:
    alone = [group([trajectory(1.0)], f"g{i}") for i in range(3)]
    with pytest.raises(ValueError, match=r"set rollout\.group_size to 2"):
        values_of(make(alias, **options), alone)
    assert len(values_of(make(alias), alone)) == 3


@pytest.mark.parametrize("alias", sorted(ENTRY_POINTS))
def test_members_that_failed_do_not_count(alias: str) -> None:
    algorithm = make(alias)
    (whole,) = one_turn([1.0, 0.0, 0.5])
    with_holes = replace(whole, num_dispatched=8)
    assert values_of(algorithm, [with_holes]) == values_of(algorithm, [whole])


def batch_of_odd_members() -> list[Group]:
    """Return two groups: several turns, one token, and a completion without any token."""
    first = group(
        [
            trajectory(1.0, (2, 3), inference=[-0.3, -0.7, -1.1, -0.2, -0.9]),
            trajectory(0.0, (1,), inference=[-0.6]),
            trajectory(0.25, (0,), inference=[]),
            trajectory(0.5, (1, 1, 1), inference=[-1.2, -0.5, -0.8]),
        ],
        "g0",
    )
    return [first, group([trajectory(0.75), trajectory(0.0, (2,))], "g1")]


@pytest.mark.parametrize("alias", sorted(ENTRY_POINTS))
def test_one_token_and_empty_completions_are_taken(alias: str) -> None:
    algorithm, batch = make(alias), batch_of_odd_members()
    values = values_of(algorithm, batch)
    assert np.isfinite(values).all()
    assert any(values)
    loss, metrics, _ = loss_of(algorithm, batch)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(metric) for metric in metrics.values())


def test_an_empty_completion_counts_in_the_baseline_of_the_others() -> None:
    batch = [group([trajectory(1.0), trajectory(0.0, (0,), inference=[])])]
    assert flat_advantages(make("dr-grpo"), batch) == [0.5]


@pytest.mark.parametrize("alias", sorted(ENTRY_POINTS))
def test_masked_tokens_reach_neither_loss_nor_gradient_nor_metrics(alias: str) -> None:
    algorithm, batch = make(alias), batch_of_odd_members()
    clean = loss_of(algorithm, batch)
    dirty = loss_of(algorithm, batch, junk=50.0)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[2], dirty[2])
    assert {n: float(v) for n, v in clean[1].items()} == {n: float(v) for n, v in dirty[1].items()}
    assert not dirty[2][~Case(algorithm, batch, signals(algorithm, batch)).batch.loss_mask].any()


@pytest.mark.parametrize("alias", sorted(ENTRY_POINTS))
def test_shares_of_microbatches_add_up(alias: str) -> None:
    for options in aggregation_options(alias):
        algorithm, batch = make(alias, **options), batch_of_odd_members()
        case = Case(algorithm, batch, signals(algorithm, batch))
        num_rows = len(case.minibatch.rows)
        whole = share(case, range(num_rows))
        parts = [share(case, [i]) for i in range(num_rows)]
        assert sum(parts) == pytest.approx(whole, abs=1e-12), options
        assert whole != 0


@pytest.mark.parametrize(
    ("alias", "options"),
    [
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k3"}),
        ("dr-grpo", {"kl_coef": 0.1, "kl_estimator": "k2"}),
        ("dapo", {"credit": "turn", "discount": 0.7, "dual_clip": 1.5}),
        ("gspo", {"clip_low": 0.5, "clip_high": 0.5, "proximal": "inference"}),
        ("cispo", {"clip_low": 0.0, "clip_high": 0.0}),  # weights that do not move
        ("rloo", {"ratio_level": "sample_sum", "kl_coef": 0.1, "kl_estimator": "k1"}),
        ("reinforce++", {"kl_coef": 0.1, "importance_correction": "sequence_truncate"}),
        ("ppo", {"gae_lambda": 0.9, "discount": 0.95, "loss_aggregation": "sample_mean"}),
        ("gigpo", {"importance_correction": "token_mask", "mask_floor": 0.2, "tis_cap": 3.0}),
        ("topr", {"weight_cap": 1e-9}),  # every weight at the cap
        ("raft++", {}),
        ("starpo", {"staleness_discount": 0.9}),
        ("sft", {}),
        ("opd", {"reward_coef": 0.5}),
    ],
)
def test_gradients_are_those_of_finite_differences(alias: str, options: dict[str, object]) -> None:
    """A toy policy: logits are features times a matrix, and a value is a dot product."""
    algorithm, batch = make(alias, **options), batch_of_odd_members()
    case = Case(algorithm, batch, signals(algorithm, batch))
    generator = torch.Generator().manual_seed(1)
    num_tokens = int(case.batch.loss_mask.sum())
    features = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    tokens = torch.randint(4, (num_tokens,), generator=generator)

    def loss(weights: torch.Tensor) -> torch.Tensor:
        logprobs = (features @ weights[:, :4]).log_softmax(1)
        chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
        return case.loss(chosen, {"values": features @ weights[:, 4]})[0]

    start = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    found = gradient(loss, start)
    expected = slopes(loss, start).flatten().tolist()
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert int(found[:, :4].count_nonzero()) >= 6
    if alias == "ppo":
        assert found[:, 4].all()


def aggregation_options(alias: str) -> Iterator[dict[str, object]]:
    if alias == "sft":
        return
    for how in AGGREGATIONS:
        norm = {"norm_tokens": 7} if how == "sample_sum_norm" else {}
        yield {"loss_aggregation": how, **norm}


def loss_of(
    algorithm: Algorithm, batch: list[Group], junk: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Return loss, metrics and gradient, with ``junk`` in every masked place."""
    case = Case(algorithm, batch, signals(algorithm, batch))
    part = case.batch
    masked = torch.where(part.loss_mask, 0.0, junk)
    part.advantages = part.advantages + masked
    part.inference_logprobs = part.inference_logprobs - masked
    part.signals = {name: tensor + masked for name, tensor in part.signals.items()}
    logprobs = torch.linspace(-2, -0.1, len(masked), dtype=torch.float64)
    logprobs = torch.where(part.loss_mask, logprobs, -junk).requires_grad_()
    part.outputs = {"values": torch.where(part.loss_mask, 0.3, junk)}
    loss, metrics = algorithm.loss(logprobs, part)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), metrics, logprobs.grad


def share(case: Case, members: object) -> float:
    part = case.part(list(members))  # type: ignore[call-overload]
    whole = torch.linspace(-2, -0.1, int(case.batch.loss_mask.sum()), dtype=torch.float64)
    ids = case.batch.sample_ids[case.batch.loss_mask]
    mine = torch.isin(ids, torch.tensor(list(members)))  # type: ignore[call-overload]
    return float(case.loss(whole[mine], {"values": whole[mine] / 3}, part)[0])
