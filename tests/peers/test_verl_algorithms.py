"""Our advantages and losses against verl's own functions, on random batches."""

import math

import pytest
import torch
from peer_batch import MAX_TOKENS, TOLERANCE, PeerBatch, assert_same, options_of

from rollart_algorithms.cispo import CISPO
from rollart_algorithms.divergence import kl_tokens
from rollart_algorithms.dr_grpo import DrGRPO
from rollart_algorithms.grpo import GRPO
from rollart_algorithms.gspo import GSPO
from rollart_algorithms.ppo import PPO
from rollart_algorithms.reinforce_pp import ReinforcePP
from rollart_algorithms.rloo import RLOO
from rollart_algorithms.sft import SFT
from rollart_core.contracts.algorithm import Algorithm

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # of what verl imports
]

SEEDS = range(3)
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sample_mean": "seq-mean-token-mean",
    "sample_sum": "seq-mean-token-sum",
    "sample_sum_norm": "seq-mean-token-sum-norm",
}


def core() -> object:
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def actor(low: float, high: float, c: float = 3.0) -> object:
    config = pytest.importorskip("verl.workers.config")
    return config.ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.double(), atol=TOLERANCE, rtol=TOLERANCE)


def unbiased(batch: PeerBatch) -> float:
    """Return what verl's whitening multiplies ours by: it divides by one token less."""
    num_tokens = batch.lengths.sum()
    return math.sqrt((num_tokens - 1) / num_tokens)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("algorithm", "by_std"),
    [(GRPO(std_correction=1), True), (DrGRPO(), False)],
    ids=["grpo", "dr-grpo"],
)
def test_group_relative_advantages(algorithm: Algorithm, by_std: bool, seed: int) -> None:
    batch = PeerBatch(seed)
    theirs, _ = core().compute_grpo_outcome_advantage(
        batch.token_rewards(), batch.mask, batch.index, norm_adv_by_std_in_grpo=by_std
    )
    close(batch.advantages(algorithm), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_advantages(seed: int) -> None:
    batch = PeerBatch(seed)
    theirs, _ = core().compute_rloo_outcome_advantage(
        batch.token_rewards(), batch.mask, batch.index
    )
    close(batch.advantages(RLOO()), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_reinforce_pp_advantages(seed: int, kl_coef: float) -> None:
    batch = PeerBatch(seed)
    config = pytest.importorskip("verl.trainer.config").AlgoConfig(gamma=1.0)
    kl = core().kl_penalty(batch.padded(batch.inference), batch.padded(batch.ref), "k1")
    rewards = batch.token_rewards() - kl_coef * kl * batch.mask
    theirs, _ = core().compute_reinforce_plus_plus_outcome_advantage(
        rewards, batch.mask, config=config
    )
    close(batch.advantages(ReinforcePP(kl_coef=kl_coef)) * unbiased(batch), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_pp_with_a_baseline(seed: int) -> None:
    batch = PeerBatch(seed)
    theirs, _ = core().compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.token_rewards(), batch.mask, batch.index
    )
    ours = batch.advantages(ReinforcePP(baseline="group_mean"))
    close(ours * unbiased(batch), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8)])
def test_generalised_advantages(seed: int, discount: float, gae_lambda: float) -> None:
    batch = PeerBatch(seed)
    theirs, returns = core().compute_gae_advantage_return(
        batch.token_rewards(), batch.padded(batch.values), batch.mask, discount, gae_lambda
    )
    algorithm = PPO(discount=discount, gae_lambda=gae_lambda)
    close(batch.advantages(algorithm) * unbiased(batch), theirs * batch.mask)
    plain = batch.advantages(PPO(discount=discount, gae_lambda=gae_lambda, normalise="none"))
    close(plain + batch.padded(batch.values), returns * batch.mask)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", sorted(AGGREGATIONS))
@pytest.mark.parametrize("correction", ["none", "token", "sequence", "token_icepop"])
def test_clipped_losses(seed: int, how: str, correction: str) -> None:
    batch = PeerBatch(seed)
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "loss_aggregation": how}
    options |= {"norm_tokens": MAX_TOKENS} if how == "sample_sum_norm" else {}
    options |= {
        "none": {"importance_correction": "none"},
        "token": {"tis_cap": 1.3},
        "sequence": {"importance_correction": "sequence_truncate", "tis_cap": 1.3},
        "token_icepop": {
            "importance_correction": "token_mask",
            "mask_floor": 0.7,
            "tis_cap": 1.3,
        },
    }[correction]
    algorithm = GRPO(**options_of(options))
    now = batch.padded(batch.now).requires_grad_()
    theirs, _ = core().compute_policy_loss_vanilla(
        batch.padded(batch.proximal),
        now,
        batch.advantages(algorithm),
        batch.mask,
        AGGREGATIONS[how],
        actor(0.2, 0.28),
        weights(batch, correction),
    )
    assert_same(batch.loss(algorithm), theirs, now, batch)


def weights(batch: PeerBatch, correction: str) -> torch.Tensor | None:
    """Return verl's importance weights ``[B, T]``."""
    if correction == "none":
        return None
    made, _ = pytest.importorskip(
        "verl.trainer.ppo.rollout_corr_helper"
    ).compute_rollout_correction_weights(
        batch.padded(batch.proximal - batch.inference),
        batch.mask,
        rollout_is=correction.removesuffix("_icepop"),
        rollout_is_threshold="0.7_1.3" if correction.endswith("icepop") else 1.3,
    )
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_ratios(seed: int) -> None:
    batch = PeerBatch(seed)
    algorithm = GSPO(**options_of({"clip_low": 0.1, "clip_high": 0.1, **PLAIN}))
    now = batch.padded(batch.now).requires_grad_()
    theirs, _ = core().compute_policy_loss_gspo(
        batch.padded(batch.proximal),
        now,
        batch.advantages(algorithm),
        batch.mask,
        "seq-mean-token-mean",
        actor(0.1, 0.1),
    )
    assert_same(batch.loss(algorithm), theirs, now, batch)


@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_weights(seed: int) -> None:
    batch = PeerBatch(seed)
    algorithm = CISPO(**options_of({"clip_low": 0.2, "clip_high": 0.28, **PLAIN}))
    now = batch.padded(batch.now).requires_grad_()
    theirs, _ = core().compute_policy_loss_cispo(
        batch.padded(batch.proximal),
        now,
        batch.advantages(algorithm),
        batch.mask,
        "token-mean",
        actor(0.2, 0.28),
    )
    assert_same(batch.loss(algorithm), theirs, now, batch)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["token_mean", "sample_mean"])
def test_critic_losses(seed: int, how: str) -> None:
    batch = PeerBatch(seed)
    options = {"loss_aggregation": how, "value_clip": 0.3, "value_coef": 1.0, **PLAIN}
    algorithm = PPO(**options)
    advantages = batch.advantages(algorithm)
    plain = batch.advantages(PPO(normalise="none"))
    now = batch.padded(batch.now).requires_grad_()
    policy, _ = core().compute_policy_loss_vanilla(
        batch.padded(batch.proximal),
        now,
        advantages,
        batch.mask,
        AGGREGATIONS[how],
        actor(0.2, 0.2, c=1e9),
    )
    critic, _ = core().compute_value_loss(
        batch.padded(batch.values_now),
        plain + batch.padded(batch.values),
        batch.padded(batch.values),
        batch.mask,
        0.3,
        AGGREGATIONS[how],
    )
    assert_same(batch.loss(algorithm), policy + critic, now, batch)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences(seed: int, estimator: str) -> None:
    batch = PeerBatch(seed)
    theirs = core().kl_penalty(torch.tensor(batch.now), torch.tensor(batch.ref), estimator)
    close(kl_tokens(torch.tensor(batch.ref - batch.now), estimator), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_likelihood(seed: int) -> None:
    batch = PeerBatch(seed)
    now = batch.padded(batch.now).requires_grad_()
    theirs = core().agg_loss(-now, batch.mask, "token-mean")
    assert_same(batch.loss(SFT()), theirs, now, batch)


PLAIN = {"importance_correction": "none"}
