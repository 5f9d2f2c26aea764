"""A mixture's weights as a trainer publishes them, under the names a server loads them by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollart_core.config.run import Trainer
from rollart_core.errors import ConfigError
from rollart_core.models.hub_names import as_in_files
from rollart_core.plugins.registry import build
from rollart_core.runtime.workload import of_config
from rollart_core.training import checkpoint
from rollart_core.training.trainer import Trainer as LiveTrainer
from rollart_core.types import Sample
from rollart_plugins.engines.sglang_weights import model_folder


def mixture() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(num_hidden_layers=2, vocab_size=64, **sizes, **heads, **experts)
    return Qwen3MoeForCausalLM(config)


def test_experts_are_published_under_the_names_of_the_files(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    published = dict(checkpoint.stream(checkpoint.named_tensors(model), torch.float32))
    assert set(published) != set(files)  # or there would be nothing to do
    given = dict(as_in_files(published.items(), ["Qwen3MoeForCausalLM"]))
    assert set(given) == set(files)
    for name, tensor in files.items():
        assert torch.equal(given[name], tensor), name
    # the planner counts what there is, but for norms and routers
    shape = of_config(json.loads((tmp_path / "config.json").read_text()), 4.0)
    assert shape.expert_params == sum(t.numel() for n, t in files.items() if ".experts." in n)
    assert shape.num_outer_params == 2 * 64 * 32


def test_other_models_stay_as_they_are() -> None:
    fused = [("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(2, 4, 8))]
    assert list(as_in_files(fused, ["GptOssForCausalLM"])) == fused


def test_weights_by_folder_need_the_config_on_this_machine(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    for path in ("nobody/none-8B", str(tmp_path / "no folder")):
        with pytest.raises(ConfigError, match="neither a folder nor in the hub's cache"):
            model_folder(path)


def test_a_mixture_is_trained_and_published(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path / "model")
    channel = build("weight_channels", "disk", location=str(tmp_path / "weights"))
    config = Trainer(activation_checkpointing=True)
    settings = {"model_path": str(tmp_path / "model"), "dtype": "bfloat16", "device": "cpu"}
    trainer = LiveTrainer(config, build("algorithms", "grpo"), channel=channel, **settings)
    at = np.arange(12)
    sampled = np.where(at >= 6, 0, -1)
    row = Sample(at, at >= 6, np.zeros(12, dtype=np.float32), sampled, sampled)
    losses = [trainer.supervise([row, row], 1e-2)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.publish(1)
    files = load_file(tmp_path / "model" / "model.safetensors")
    given = dict(channel.fetch(1))
    shapes = {name: tensor.shape for name, tensor in given.items()}
    assert shapes == {name: tensor.shape for name, tensor in files.items()}
    assert {tensor.dtype for tensor in given.values()} == {torch.bfloat16}
    trainer.close()
