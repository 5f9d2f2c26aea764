"""The plan's estimate of activations, beside what autograd keeps of small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollart_core.runtime.workload import of_config
from rollart_planner.memory import TrainingNumbers, rank_bytes

NUM_TOKENS = 512
SIZES = {
    **{"hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    **{"num_hidden_layers": 4, "intermediate_size": 640, "vocab_size": 64},
    **{"attn_implementation": "sdpa"},
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}


def new_model(is_mixture: bool) -> Any:
    import transformers

    if is_mixture:
        config: Any = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)
        return transformers.Qwen3MoeForCausalLM(config)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def kept_bytes(model: Any) -> int:
    """Return the bytes that the backward pass of the layers needs, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(NUM_TOKENS)[None] % 64, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


@pytest.mark.parametrize("is_mixture", [False, True])
def test_what_layers_keep_is_about_what_the_plan_says(is_mixture: bool) -> None:
    model = new_model(is_mixture).to(torch.bfloat16)
    shape = of_config(model.config.to_dict(), 2.0)
    run = TrainingNumbers(num_ranks=1, num_tokens=NUM_TOKENS)
    estimate = rank_bytes(shape, run)["activations"]
    assert kept_bytes(model) == pytest.approx(estimate, rel=0.15)
