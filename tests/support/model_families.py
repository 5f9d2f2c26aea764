"""Tiny random models of the architectures of transformers."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "n_group", "topk_group", "n_shared_experts"), 1),
    "num_key_value_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "num_experts_per_tok": 2,
    "state_size": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGEST = 20_000_000
"""Parameters of the largest model that is made."""
WINDOW = 8
"""Tokens of a sliding window, which is shorter than the rows of the tests."""
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
"""Sizes of architectures that the common sizes do not fit."""


def make_model_of(model_type: str, **more: Any):
    """Return a tiny causal LM of a ``model_type`` of transformers, with random weights.

    Args:
        model_type: A key of transformers' auto classes.
        more: Fields of the config that replace the common ones.

    Raises:
        ValueError: If parts of the model have a fixed size, such as an image encoder.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[model_type]
    standard = kind()
    sizes = {name: value for name, value in SIZES.items() if hasattr(standard, name)}
    if getattr(standard, "sliding_window", None):
        sizes["sliding_window"] = WINDOW
    config = kind(**(sizes | SPECIAL.get(model_type, {}) | more))
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type} has {size:,} parameters, with parts of a fixed size")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()
