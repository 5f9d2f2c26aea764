"""Architectures of transformers: packed and padded rows, and the engine's cache."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.model_families import make_model_of

from rollart_core.training import policy
from rollart_cpu.inference.decoder import HuggingFaceRunner
from rollart_cpu.inference.runner import TokenBatch

PACKED = (
    *("deepseek_v3", "gemma", "glm4_moe", "gpt2", "llama", "minimax_m2", "mixtral", "olmo2"),
    *("phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
)
PADDED = (
    *("falcon_h1", "falcon_mamba", "gemma2", "gemma3_text", "gpt_oss", "granitemoehybrid", "lfm2"),
    *("llama4_text", "mamba", "minimax", "mistral", "nemotron", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv"),
)
LENGTHS = (9, 5, 14)
SAME = 1e-5
"""Relative difference of float32 logits that rounding can explain."""


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def rows(seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, 120, length) for length in LENGTHS]


def alone(model: torch.nn.Module, row: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.tensor(row)[None], use_cache=False).logits[0]


def padded(model: torch.nn.Module, many: list[np.ndarray]) -> torch.Tensor:
    ids, mask = torch.zeros(2, len(many), max(LENGTHS), dtype=torch.long)
    for i, row in enumerate(many):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return torch.cat([logits[i, : len(row)] for i, row in enumerate(many)])


def packed(model: torch.nn.Module, many: list[np.ndarray]) -> torch.Tensor:
    policy.install_packed_attention(model)
    return policy.packed_forward(model, many, torch.arange(sum(LENGTHS)))


@pytest.mark.parametrize("model_type", PACKED + PADDED)
@torch.no_grad()
def test_rows_of_a_batch_have_the_logits_of_each_row_alone(model_type: str) -> None:
    model, many = make_model_of(model_type), rows()
    wanted = torch.cat([alone(model, row) for row in many])
    assert difference(padded(model, many), wanted) < SAME
    assert policy.supports_packing(model) == (model_type in PACKED)
    if model_type in PACKED:
        assert difference(packed(model, many), wanted) < SAME


@pytest.mark.slow
@pytest.mark.timeout(1200)
@torch.no_grad()
def test_every_architecture_that_is_packed_may_be() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wrong, tried, many = {}, 0, rows()
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            model = make_model_of(model_type)
            wanted = torch.cat([alone(model, row) for row in many])
        except Exception:  # the common sizes do not fit it
            continue
        if not policy.supports_packing(model):
            continue
        tried += 1
        try:
            off = difference(packed(model, many), wanted)
        except (NotImplementedError, TypeError) as e:
            wrong[model_type] = repr(e)
        else:
            if not off < SAME:
                wrong[model_type] = off
    assert not wrong
    assert tried > 40, tried


def test_the_page_lists_the_architectures(repo_root: Path) -> None:
    page = (repo_root / "docs/reference/models.md").read_text(encoding="utf-8")
    _, packed_ones, padded_ones = page.partition("\n## Models that")[0].split("\n- **P")
    assert sorted(re.findall("`([a-z0-9_]+)`", packed_ones)) == sorted(PACKED)
    assert sorted(re.findall("`([a-z0-9_]+)`", padded_ones)) == sorted(PADDED)


def read(runner: HuggingFaceRunner, slot: int, start: int, ids: list[int]) -> torch.Tensor:
    columns = [[slot], [start], [len(ids)], [0]]
    batch = TokenBatch(np.array(ids), *(np.array(c, np.int64) for c in columns))
    return runner.forward(batch)[0]


@pytest.mark.parametrize("model_type", ["qwen3", *PADDED])
def test_the_engine_continues_a_cache_cuts_it_and_copies_it(
    model_type: str, tmp_path: Path
) -> None:
    model = make_model_of(model_type)
    model.save_pretrained(tmp_path)
    runner = HuggingFaceRunner(
        tmp_path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_slots=2,
        max_tokens=64,
        max_batch_tokens=64,
    )
    draw = np.random.default_rng(0)
    first, more = draw.integers(3, 120, 30).tolist(), draw.integers(3, 120, 6).tolist()

    def same(found: torch.Tensor, tokens: list[int]) -> None:
        with torch.no_grad():
            assert difference(found, alone(model, np.array(tokens))[-1]) < SAME

    same(read(runner, 0, 0, first[:20]), first[:20])
    for at in range(20, 30):
        last = read(runner, 0, at, first[at : at + 1])
    same(last, first)
    same(read(runner, 0, 25, more), first[:25] + more)  # the last five tokens are replaced
    runner.copy_prefix(0, 1, 22)
    same(read(runner, 1, 22, more), first[:22] + more)
    runner.copy_prefix(0, 1, 31)
    same(read(runner, 1, 31, more[:1]), first[:25] + more + more[:1])
