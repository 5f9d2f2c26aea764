"""Shapes of models, from what says how they are made."""

import json

import pytest

from rollart_core.config import ModelPath, NewModel
from rollart_core.plan.shape import of_config, shape_of

QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def test_parameters_are_counted_to_a_thousandth():
    shape = of_config(QWEN_7B, 2.0)
    assert shape.num_params == pytest.approx(7_615_616_512, rel=1e-3)
    assert (shape.head_dim, shape.num_kv_heads) == (128, 4)
    assert shape.kv_bytes_per_token == 57_344


def test_all_experts_of_a_mixture_count():
    mixture = {
        **QWEN_7B,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 2368,
    }
    assert of_config(mixture, 2.0).num_params == of_config(QWEN_7B, 2.0).num_params


def test_a_model_folder_says_it_and_a_stranger_does_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    assert shape_of(ModelPath(path=str(tmp_path), dtype="bfloat16")) == of_config(QWEN_7B, 2.0)
    (tmp_path / "config.json").write_text('{"model_type": "vision"}')
    assert shape_of(ModelPath(path=str(tmp_path))) is None


def test_a_new_model_has_the_shape_it_will_be_made_with():
    shape = shape_of(NewModel(kind="new"))
    assert shape is not None
    # embedding 1024 x 128, 3 layers of attention 128 x 64 x 6 and feed-forward 3 x 128 x 384
    assert shape.num_params == 1024 * 128 + 3 * (128 * 64 * 6 + 3 * 128 * 384)
    assert shape.bytes_per_value == 4.0
