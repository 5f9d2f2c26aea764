"""The head computes logprobs and entropies in chunks, with the gradients of the plain form."""

from typing import Any

import numpy as np
import pytest
import torch
from support.model_families import make_model_of
from torch import Tensor

from rollart_core.training import head as heads
from rollart_core.training.head import Head, Scoring, Targets, score, score_in_chunks
from rollart_core.training.policy import (
    ForwardSettings,
    PackedPolicy,
    PaddedPolicy,
    Policy,
    new_policy,
)
from rollart_core.types import Sample
from rollart_cpu.training.policy import TreePolicy

ROWS, WIDTH, VOCABULARY = 37, 16, 50


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a chunk have few rows, so that all heads work in chunks."""
    monkeypatch.setattr(heads, "chunk_rows", lambda num_tokens: 5)


@pytest.fixture
def chunked_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list of the arguments of each call that works in chunks."""
    calls: list[tuple[Any, ...]] = []
    original = heads.score_in_chunks

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(heads, "score_in_chunks", counted)
    return calls


def drawn(dtype: torch.dtype) -> tuple[list[Tensor], Targets, Tensor, Tensor]:
    """Hidden states, weight and bias; several targets at a position and none at others."""
    torch.manual_seed(0)
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    rows = torch.randint(0, ROWS, (60,)).sort().values
    targets = Targets(rows, torch.randint(0, VOCABULARY, (60,)))
    return inputs, targets, torch.randn(60, dtype=dtype), torch.randn(ROWS, dtype=dtype)


@pytest.mark.parametrize("changes", [{}, {"scale": 0.25}, {"cap": 3.0}])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_gradients_equal_those_of_the_plain_form(
    small_chunks: None,
    dtype: torch.dtype,
    apart: float,
    entropy_gradient: bool,
    changes: dict[str, float],
):
    inputs, targets, by_pair, by_row = drawn(dtype)
    scoring = Scoring(0.7, entropy_gradient, **changes)
    found = []
    for in_chunks in (True, False):
        leaves = [t.clone().requires_grad_() for t in inputs]
        hidden, weight, bias = leaves
        if in_chunks:
            values, entropy = score_in_chunks(hidden, (weight, bias), targets, scoring)
        else:
            logits = (hidden @ weight.T + bias) * changes.get("scale", 1)
            if cap := changes.get("cap"):
                logits = cap * torch.tanh(logits / cap)
            logp = torch.log_softmax(logits / 0.7, -1)
            values, entropy = logp[targets.rows, targets.tokens], -(logp.exp() * logp).sum(-1)
        loss = (values * by_pair).sum() + (entropy * by_row).sum() * entropy_gradient
        loss.backward()
        assert entropy.requires_grad == entropy_gradient or not in_chunks
        found.append([values.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)])
    for ours, plain in zip(*found, strict=True):
        assert float((ours - plain).abs().max() / plain.abs().max()) < apart


def test_a_frozen_head_gets_no_gradient(small_chunks: None):
    (hidden, weight, _), targets, _, _ = drawn(torch.float64)
    hidden.requires_grad_()
    score_in_chunks(hidden, (weight, None), targets, Scoring())[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_under_autocast_products_are_bfloat16_and_logprobs_float32(small_chunks: None):
    (hidden, weight, _), targets, _, _ = drawn(torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        values, entropy = score_in_chunks(hidden, (weight, None), targets, Scoring())
        plain = score(torch.nn.functional.linear(hidden, weight).float(), targets)
    assert values.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(values, plain[0], atol=0.07, rtol=0)
    torch.testing.assert_close(entropy, plain[1], atol=0.07, rtol=0)
    values.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def samples_of(vocabulary: int) -> list[Sample]:
    rng = np.random.default_rng(1)
    samples = []
    for length in (9, 14, 14, 6):
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        ids = rng.integers(3, vocabulary, length).astype(np.int32)
        none = np.where(mask, 0, -1).astype(np.int32)
        samples.append(Sample(ids, mask, np.zeros(length, np.float32), none, none))
    return samples


def outcome(policy: Policy, *, hidden: bool = False) -> list[Tensor]:
    """Logprobs, entropies and gradients of a loss of both."""
    policy.model.zero_grad()
    samples = samples_of(100)
    values, entropy, states = policy.outputs(samples, hidden=hidden, entropy_gradient=True)
    weights = torch.linspace(-1, 1, len(values))
    loss = (values * weights).sum() + 0.3 * entropy.sum()
    if states is not None:
        loss = loss + (states * 0.1).sum()
    loss.backward()
    grads = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
    return [values.detach(), entropy.detach(), *grads]


def assert_alike(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        scale = max(float(b.abs().max()), 1e-3)
        assert float((a - b).abs().max()) / scale < 5e-5


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", [PackedPolicy, PaddedPolicy, TreePolicy])
def test_every_forward_pass_computes_the_same_in_chunks(
    kind: type[Policy],
    hidden: bool,
    chunked_calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
):
    policy = kind(make_model_of("qwen3"), ForwardSettings(temperature=1.3))
    plain = outcome(policy, hidden=hidden)
    monkeypatch.setattr(heads, "chunk_rows", lambda num_tokens: 5)
    assert_alike(outcome(policy, hidden=hidden), plain)
    assert len(chunked_calls) == 1


PACKED = (
    *("cohere", "deepseek_v3", "gemma", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "llama"),
    *("minimax_m2", "mixtral", "olmo2", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
)
PADDED = (
    *("falcon_h1", "falcon_mamba", "gemma2", "gemma3_text", "gpt_oss", "granitemoehybrid", "lfm2"),
    *("llama4_text", "mamba", "minimax", "mistral", "nemotron", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv"),
)
CHANGES: dict[str, dict[str, object]] = {
    "cohere": {"logit_scale": 0.3},
    "falcon_h1": {"lm_head_multiplier": 0.4},
    "gemma2": {"final_logit_softcapping": 0.5},
    "granite": {"logits_scaling": 4.0},
    "granitemoehybrid": {"logits_scaling": 4.0},
    "recurrent_gemma": {"logits_soft_cap": 0.5},
}
"""Models that change the output of their heads, and by how much."""


@pytest.mark.parametrize("family", PACKED + PADDED)
def test_every_architecture_is_computed_in_chunks(
    family: str, chunked_calls: list[tuple[Any, ...]]
):
    model = make_model_of(family, **CHANGES.get(family, {}))
    policy = new_policy(model, ForwardSettings(temperature=1.3, kernels="torch"))
    plain = outcome(policy)
    assert not chunked_calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "chunk_rows", lambda num_tokens: 5)
        assert_alike(outcome(policy), plain)
    assert len(chunked_calls) == 1
    scoring = chunked_calls[0][3]
    assert (scoring.scale != 1 or scoring.cap is not None) == (family in CHANGES)


def test_a_model_that_changes_its_logits_otherwise_keeps_the_plain_form(
    small_chunks: None, chunked_calls: list[tuple[Any, ...]]
):
    class Squared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = make_model_of("qwen3")
            self.config = self.base.config
            self.get_output_embeddings = self.base.get_output_embeddings

        def forward(self, **given: object) -> object:
            out = self.base(**given)
            out.logits = out.logits**2
            return out

    outcome(PaddedPolicy(Squared(), ForwardSettings()))
    assert not chunked_calls


def test_the_model_is_tried_before_any_batch_is_large():
    """Ranks whose batches differ in size run the same forward passes."""
    policy = PackedPolicy(make_model_of("qwen3"), ForwardSettings())
    calls = []
    policy.model.register_forward_hook(lambda *given: calls.append(given))
    outcome(policy)
    assert len(calls) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "chunk_rows", lambda num_tokens: 5)
        outcome(policy)
    assert len(calls) == 3


def test_the_head_is_put_back():
    model = make_model_of("qwen3")
    head = Head(model)
    with pytest.raises(KeyError), head.replaced(lambda hidden: hidden):
        raise KeyError
    assert "forward" not in vars(model.get_output_embeddings())


def test_no_tensor_of_all_logits_exists(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads, "CHUNK_BYTES", 4 * VOCABULARY * 4)
    (hidden, weight, _), targets, _, _ = drawn(torch.float32)
    sizes: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in [out] if isinstance(t, Tensor))
            return out

    hidden.requires_grad_()
    with Watch():
        score_in_chunks(hidden, (weight, None), targets, Scoring())[0].sum().backward()
    assert max(sizes) < ROWS * VOCABULARY
