"""Small random models of several families, saved as folders, and engines that serve them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from rollart_plugins.engines.embedded import EmbeddedEngine

VOCAB = 300
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(family: str, seed: int = 0):
    """A model of ``qwen3``, ``qwen2``, ``llama`` or ``gpt2`` with every weight random."""
    import torch
    import transformers as hf

    torch.manual_seed(seed)
    if family == "gpt2":
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = hf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, **special
        )
        model = hf.GPT2LMHeadModel(config)
    elif family == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE))
    elif family == "llama":
        shape = SHAPE | {"num_key_value_heads": 4}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, attention_bias=True, mlp_bias=True))
    else:
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save(model, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def serve(made: EmbeddedEngine, work):
    """Run ``work(engine)`` between start and close."""

    async def inside():
        await made.start()
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(inside())
