"""Shapes of models, from what says how they are made."""

import json

import pytest
from pydantic import ValidationError

from rollart_core.config.model import ModelPath, NewModel, Shape
from rollart_core.errors import ConfigError
from rollart_core.runtime.workload import of_config, shape_of

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


QWEN3_8B = {
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    **{"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128},
    **{"vocab_size": 151936, "tie_word_embeddings": False},
}
QWEN3_30B_A3B = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32},
    **{"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128},
    **{"vocab_size": 151936, "tie_word_embeddings": False, "moe_intermediate_size": 768},
    **{"num_experts": 128, "num_experts_per_tok": 8},
}


def test_a_mixture_says_what_a_token_goes_through():
    shape = of_config(QWEN3_30B_A3B, 2.0)
    assert shape.num_params == pytest.approx(30_532_122_624, rel=1e-3)
    assert shape.active_params == pytest.approx(3_353_032_704, rel=1e-2)  # less the routers
    assert (shape.num_experts, shape.experts_per_token) == (128, 8)
    # 128 experts of three matrices of 2048 x 768, in each of 48 layers
    assert shape.expert_params == pytest.approx(48 * 128 * 3 * 2048 * 768)


def test_a_config_may_say_the_shape_of_a_model_that_is_not_here(tmp_path):
    said = Shape(
        num_params=8_190_735_360, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128
    )
    path = ModelPath(path="nobody/none-8B", dtype="bfloat16", shape=said)
    shape = shape_of(path)
    assert shape is not None
    assert shape.weight_bytes == 2 * 8_190_735_360
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    here = path.model_copy(update={"path": str(tmp_path)})
    assert shape_of(here) == of_config(QWEN3_8B, 2.0)
    wrong = said.model_copy(update={"num_kv_heads": 4})
    with pytest.raises(ConfigError, match=r"num_kv_heads is 4, but .*config.json has 8"):
        shape_of(here.model_copy(update={"shape": wrong}))
    wrong = said.model_copy(update={"num_params": 7_000_000_000})
    with pytest.raises(ConfigError, match=r"num_params is 7,000,000,000, but"):
        shape_of(here.model_copy(update={"shape": wrong}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": 8}, "needs num_active_params"),
        ({"num_experts": 8, "experts_per_token": 8, "num_active_params": 5}, "must be below"),
        ({"num_experts": 8, "experts_per_token": 2, "num_active_params": 500}, "cannot be above"),
        ({"num_outer_params": 100}, "must be below num_params"),
    ],
)
def test_a_shape_that_cannot_be(changes, says):
    with pytest.raises(ValidationError, match=says):
        Shape(num_params=100, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, **changes)
