"""Our losses against those that TRL's trainers compute, on random batches."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from peer_batch import MAX_TOKENS, TOLERANCE, PeerBatch, assert_same, options_of

from rollart_algorithms.cispo import CISPO
from rollart_algorithms.dapo import DAPO
from rollart_algorithms.dr_grpo import DrGRPO
from rollart_algorithms.grpo import GRPO
from rollart_algorithms.gspo import GSPO
from rollart_algorithms.rloo import RLOO
from rollart_core.contracts.algorithm import Algorithm

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SEEDS = range(3)
PLAIN = {"importance_correction": "none"}
HIGHER = {**PLAIN, "clip_high": 0.28}


def trainer(now: torch.Tensor, **changes: object) -> SimpleNamespace:
    """Return what the loss of TRL's trainers reads of its trainer."""
    fields = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (now, torch.zeros_like(now), None),
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        "args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "epsilon_high": 0.28,
        "epsilon_low": 0.2,
        "importance_sampling_level": "token",
        "max_completion_length": MAX_TOKENS,
        "model": SimpleNamespace(training=True),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
    }
    return SimpleNamespace(**{**fields, **changes})


def inputs(batch: PeerBatch, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    prompt = torch.zeros(len(batch.lengths), 1, dtype=torch.long)
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros(batch.mask.shape, dtype=torch.long),
        "completion_mask": batch.mask,
        "advantages": advantages[:, 0],
        "old_per_token_logps": batch.padded(batch.proximal),
        "ref_per_token_logps": batch.padded(batch.ref),
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": batch.padded(batch.proximal - batch.inference)
        .exp()
        .clamp(max=2.0),
        "old_logps": (batch.padded(batch.proximal) * batch.mask).sum(1),
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (GRPO(**options_of({"loss_aggregation": "sample_mean", **HIGHER})), {"loss_type": "grpo"}),
        (GRPO(**options_of({"loss_aggregation": "token_mean", **HIGHER})), {"loss_type": "bnpo"}),
        (
            GRPO(**options_of({"loss_aggregation": "sample_mean", "kl_coef": 0.1, **HIGHER})),
            {"loss_type": "grpo", "beta": 0.1},
        ),
        (
            GRPO(**options_of({"loss_aggregation": "sample_mean", "dual_clip": 1.5, **HIGHER})),
            {
                "loss_type": "grpo",
                "args": SimpleNamespace(
                    use_bias_correction_kl=False, delta=1.5, steps_per_generation=1
                ),
            },
        ),
        (
            DrGRPO(
                **options_of(
                    {
                        "clip_high": 0.28,
                        "loss_aggregation": "sample_sum_norm",
                        "norm_tokens": MAX_TOKENS,
                        **PLAIN,
                    }
                )
            ),
            {"loss_type": "dr_grpo"},
        ),
        (DAPO(**options_of(PLAIN)), {"loss_type": "dapo"}),
        (DAPO(**options_of({})), {"loss_type": "dapo", "use_vllm": True}),
        (
            CISPO(**options_of({"clip_high": 0.4, **PLAIN})),
            {"loss_type": "cispo", "epsilon_high": 1.4},
        ),
        (
            GSPO(**options_of({"clip_low": 0.1, "clip_high": 0.1, **PLAIN})),
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 0.1,
                "epsilon_high": 0.1,
            },
        ),
    ],
    ids=[
        "grpo",
        "grpo-token-mean",
        "grpo-kl",
        "grpo-dual-clip",
        "dr-grpo",
        "dapo",
        "dapo-tis",
        "cispo",
        "gspo",
    ],
)
def test_losses_of_groups(algorithm: Algorithm, changes: dict[str, object], seed: int) -> None:
    batch = PeerBatch(seed)
    theirs = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    now = batch.padded(batch.now).requires_grad_()
    given = inputs(batch, batch.advantages(algorithm))
    loss = theirs._compute_loss(trainer(now, **changes), None, given)
    assert_same(batch.loss(algorithm), loss, now, batch)


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_of_leave_one_out(seed: int) -> None:
    batch = PeerBatch(seed)
    # TRL's ratio and loss are of whole samples; ours has the same at every token: their mean
    algorithm = RLOO(
        **options_of({"ratio_level": "sample_sum", "loss_aggregation": "sample_mean", **PLAIN})
    )
    theirs = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    now = batch.padded(batch.now).requires_grad_()
    given = inputs(batch, batch.advantages(algorithm))
    loss = theirs._compute_loss(trainer(now, epsilon_high=0.2), None, given)
    assert_same(batch.loss(algorithm), loss, now, batch)


@pytest.mark.parametrize("seed", SEEDS)
def test_supervised_losses(seed: int) -> None:
    """Of transformers, which TRL's SFTTrainer takes: cross-entropy of shifted labels."""
    loss_of = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss
    from rollart_algorithms.sft import SFT

    batch = PeerBatch(seed)
    logits = torch.randn(len(batch.lengths), MAX_TOKENS + 1, 5, dtype=torch.float64)
    labels = torch.randint(5, (len(batch.lengths), MAX_TOKENS + 1))
    labels[:, 0] = -100
    labels[:, 1:][~batch.mask.bool()] = -100
    theirs = loss_of(logits, labels, vocab_size=5)
    chosen = logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:].clamp(min=0)[..., None])
    batch.now = batch.flat(chosen.squeeze(-1)).numpy()
    ours, _ = batch.loss(SFT())
    torch.testing.assert_close(ours, theirs.double(), atol=TOLERANCE, rtol=TOLERANCE)
