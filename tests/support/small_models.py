"""Small random models, groups of random tokens, and trainers for them."""

from pathlib import Path

import numpy as np
import torch

from rollart_algorithms.grpo import GRPO
from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.training.trainer import Trainer
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory

VOCAB = 61
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ARCHITECTURES = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {},
    "llama": {"num_key_value_heads": 1, "num_hidden_layers": 1, "tie_word_embeddings": False},
    "mistral": {"sliding_window": None, "head_dim": 8},
}


def save_model(folder: Path, architecture: str = "qwen3", **changes: object) -> str:
    """Write a small random model with norms and biases away from their first values."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    fields = {**SMALL, **ARCHITECTURES.get(architecture, {}), **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **fields))
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def make_sample(rng: np.random.Generator, length: int, prefix: int = 0, version: int = 0) -> Sample:
    """Random tokens; ``prefix`` of them the same everywhere; two turns of 4 loss tokens."""
    ids = rng.integers(0, VOCAB, length).astype(np.int32)
    ids[:prefix] = np.arange(prefix) % VOCAB
    mask = np.zeros(length, dtype=bool)
    mask[length // 2 - 4 : length // 2] = True
    mask[-6:-2] = True
    versions = np.where(mask, version, -1).astype(np.int32)
    return Sample(ids, mask, np.where(mask, -4.0, 0).astype(np.float32), versions, versions)


def make_groups(num_groups: int = 4, size: int = 4, seed: int = 0, version: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        task, name = Task("test/Env-v1", "train", g, 0), f"g{g}"
        members = tuple(
            Trajectory(
                Ticket(f"{name}.{i}", task, name, i),
                "finished",
                (make_sample(rng, int(rng.integers(24, 90)), prefix=12, version=version),),
                reward=float(rng.random()),
            )
            for i in range(size)
        )
        groups.append(Group(name, task, members, size))
    return groups


def make_trainer(path: str, algorithm: GRPO | None = None, **changes: object) -> Trainer:
    own = {
        k: changes.pop(k)
        for k in ("deterministic", "temperature", "channel", "dtype", "beside")
        if k in changes
    }
    config = TrainerConfig(**{"max_tokens_per_microbatch": 256, "warmup_train_steps": 0, **changes})
    return Trainer(config, algorithm or GRPO(), model_path=path, device="cpu", **own)


def reference_logprobs(model: torch.nn.Module, sample: Sample, temperature: float) -> torch.Tensor:
    """Plain transformers, one row at a time."""
    logp = torch.log_softmax(reference_logits(model, sample) / temperature, -1)
    targets = torch.from_numpy(sample.token_ids[sample.loss_mask].astype(np.int64))
    return logp.gather(1, targets[:, None]).squeeze(1)


def reference_logits(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Return those from before the loss tokens ``[K, V]``, by plain transformers."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    return model(ids[None]).logits[0][np.flatnonzero(sample.loss_mask) - 1]


def small_mixture(folder: Path, **changes: object) -> str:
    """Write a small random mixture of experts, a tensor for each expert in its files."""
    experts = {"moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 2}
    return save_model(folder, "qwen3_moe", head_dim=16, **{**experts, **changes})
