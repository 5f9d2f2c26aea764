"""What a ``lora`` section cannot go with is said when a config loads."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart_core.config.load import load_config
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.config.validation import plugins as validation
from rollart_core.errors import ConfigError

NEW = ("model={kind: new}", "warm_start={until_success: 0.5}")
URL = "http://127.0.0.1:9"
VLLM = ("engine=vllm", f"engine.url={URL}")
Resolve = Callable[..., ResolvedRun]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the head of a safetensors file, and none of its tensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    shapes = {
        "model.embed_tokens.weight": [9, 4],
        "model.layers.0.self_attn.q_proj.weight": [4, 4],
        "model.layers.1.mlp.up_proj.weight": [8, 4],
        "model.layers.1.input_layernorm.weight": [4],
        "lm_head.weight": [9, 4],
    }
    rows = {name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}
    head = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
    content = len(head).to_bytes(8, "little") + head
    (folder / "model-00001-of-00002.safetensors").write_bytes(content)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"cut off")
    return folder


@pytest.fixture
def resolve(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Resolve a config with adapters, and overrides."""
    found = importlib.util.find_spec
    monkeypatch.setattr(validation, "find_spec", lambda name: found("json"))
    path = tmp_path / "x.yaml"
    path.write_text(
        f"env: toy/Bandit-v1\nmodel: {model}\nstop: {{batches: 2}}\nlora: {{rank: 2}}\n"
    )
    return lambda *overrides: resolve_run(load_config(path, overrides), source="x.yaml")


def refused(resolve: Resolve, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*overrides)
    (line,) = str(caught.value).splitlines()
    return line.removeprefix("x.yaml: ")


def test_adapters_travel_to_the_trainer_and_are_on_record(resolve):
    run = resolve("lora.target_modules=[q_proj]", "lora.sync=adapter")
    assert (run.beside.lora.rank, run.beside.lora.target_modules) == (2, ("q_proj",))
    assert run.as_dict()["lora"]["sync"] == "adapter"
    assert resolve(*VLLM).beside.lora
    assert resolve(*VLLM, "lora.sync=adapter").beside.lora


def test_a_warm_start_of_a_new_model_is_whole_and_adapters_begin_with_rl(resolve):
    assert resolve(*NEW).beside.warms_whole
    assert not resolve(*NEW, "lora=null").beside.warms_whole
    assert not resolve(NEW[1]).beside.warms_whole  # the base is a trained model's


def test_several_ranks_may_train_adapters(resolve):
    assert resolve("runtime.num_trainer_ranks=2").beside.lora


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model={kind: new}"], "lora: a new model is untrained"),
        (
            [*NEW, "lora.target_modules=[q_proj, qkv_proj]"],
            "lora.target_modules: a new model has no qkv_proj; it has down_proj, gate_proj, k_proj",
        ),
        (["algorithm=ppo", "critic.backbone=own"], "critic.backbone: own: training a who"),
        (
            [*NEW, "engine=sglang", f"engine.url={URL}", "lora.sync=adapter"],
            "lora.sync: adapter: rollart/SGLang-v1 loads adapters beside a model that never",
        ),
        (
            [*VLLM, "lora.sync=adapter", "mode=sync", "runtime.colocate=true"],
            "lora.sync: adapter: a server that frees its memory in turns (runtime.colocate)",
        ),
        (
            [*VLLM, "lora.sync=adapter", "rollout.kv_on_swap=keep"],
            "rollout.kv_on_swap: keep has no effect with lora.sync: adapter on rollart/VLLM-v1",
        ),
        (
            ["lora.target_modules=[up_proj, embed_tokens, nose]"],
            "lora.target_modules: {model} has no embed_tokens, nose; it has q_proj, up_proj",
        ),
        (["lora.target_modules=[]"], "lora: target_modules is empty"),
        (["lora.dropout=0.1"], "lora.dropout: "),
        (["lora.alpha=0"], "lora.alpha: "),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(resolve, model, overrides, said):
    line = refused(resolve, *overrides)
    assert said.format(model=model) in line


def test_without_peft_it_says_how_to_get_it(resolve, monkeypatch):
    monkeypatch.setattr(validation, "find_spec", lambda name: None)
    assert refused(resolve) == "lora: peft is missing: pip install 'rollart[lora]'"


def test_a_model_whose_files_are_not_here_is_left_to_the_trainer(resolve):
    assert resolve("model=some/hub-id", "lora.target_modules=[nose]").beside.lora
