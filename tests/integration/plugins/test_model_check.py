"""``rollart model check``: findings on real small models, and models that are refused."""

import json
import sys
from pathlib import Path

import pytest
from support.model_families import make_model_of
from typer.testing import CliRunner

from rollart_core.config.model import NewModel
from rollart_core.config.validation import consistency
from rollart_core.config.validation.consistency import model_config_fault, model_path_fault
from rollart_core.models.new import new_model
from rollart_plugins.model import app

VOCAB = 320


def checked(*arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the exit code, and part -> state and text."""
    done = CliRunner().invoke(app, ["check", *arguments, "--json"])
    said = json.loads(done.stdout)
    assert said["works"] == (done.exit_code == 0)
    return done.exit_code, {f["part"]: (f["state"], f["says"]) for f in said["findings"]}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "own"
    new_model(str(path), NewModel(num_layers=2, vocab_size=VOCAB), ["What is 7 + 58? 65"], 0)
    return path


def with_tokenizer(model_type: str, own: Path, path: Path) -> str:
    """Make a model of another architecture with the tokenizer of ``own``."""
    make_model_of(model_type, vocab_size=VOCAB).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (own / name).is_file():
            (path / name).write_bytes((own / name).read_bytes())
    return str(path)


def test_a_model_of_our_own_works_everywhere(own: Path) -> None:
    code, found = checked(str(own))
    assert code == 0
    parts = ("architecture", "tokenizer", "trainer", "FSDP2", "embedded engine", "memory", "LoRA")
    assert {part: found[part][0] for part in parts} == dict.fromkeys(parts, "ok")
    assert "Qwen3ForCausalLM" in found["architecture"][1]
    assert found["tools"][0] == "no"


@pytest.mark.parametrize(
    ("model_type", "trainer", "lora"),
    [
        ("qwen3_5_text", "recurrent state", "ok"),
        ("mamba", "recurrent state", "no"),
        ("gpt_oss", "attention does not support packing", "ok"),
        ("glm4_moe", "rows are packed", "ok"),
    ],
)
def test_each_part_of_other_architectures(
    model_type: str, trainer: str, lora: str, own: Path, tmp_path: Path
) -> None:
    code, found = checked(with_tokenizer(model_type, own, tmp_path))
    assert code == 0
    assert trainer in found["trainer"][1]
    assert found["LoRA"][0] == lora
    assert found["embedded engine"][0] == "warn"
    assert found["FSDP2"][1].startswith("4 layers")


def test_more_tokens_than_embeddings_are_refused(own: Path, tmp_path: Path) -> None:
    path = with_tokenizer("llama", own, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    code, found = checked(path)
    assert (code, found["tokenizer"][0]) == (1, "no")
    assert "only 128 embeddings" in found["tokenizer"][1]


def test_a_row_takes_memory_in_proportion_to_its_length(own: Path) -> None:
    def row_mb(context: str) -> float:
        said = checked(str(own), "--context", context)[1]["memory"][1]
        return float(said.removesuffix(" MB for each row").rpartition(" ")[2])

    assert row_mb("20000") == pytest.approx(2 * row_mb("10000"), rel=0.02)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
            "is an encoder-decoder model (T5ForConditionalGeneration): use a decoder-only model",
        ),
        (
            {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
            "is not a causal language model (BertForMaskedLM): use one that generates text",
        ),
        (
            {"architectures": ["XForConditionalGeneration"], "vision_config": {"depth": 2}},
            "is a vision model (XForConditionalGeneration): use a model for text, or its text-only",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, None),
        ({"architectures": ["GPT2LMHeadModel"]}, None),
        (
            {
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "model_type": "qwen3_5",
                "vision_config": {"depth": 2},
            },
            None,
        ),
        ({"model_type": "llama"}, None),
    ],
)
def test_which_models_are_decoders_of_text(config, reason) -> None:
    found = model_config_fault(config)
    assert found is None if reason is None else found.startswith(reason)


def test_the_dry_run_refuses_what_is_no_decoder(tmp_path: Path) -> None:
    model = tmp_path / "t5"
    model.mkdir()
    (model / "config.json").write_text('{"is_encoder_decoder": true, "model_type": "t5"}')
    assert "encoder-decoder model (t5)" in str(model_path_fault(str(model)))
    (model / "config.json").write_text("[]")
    assert "must be a JSON object" in str(model_path_fault(str(model)))
    code, found = checked(str(model))
    assert (code, list(found)) == (1, ["architecture"])


def test_the_text_parts_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert "qwen3_5" in consistency._TEXT_PART
    for model_type in consistency._TEXT_PART:
        assert hasattr(CONFIG_MAPPING[model_type](), "vision_config")
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type].endswith("ForCausalLM")


def test_the_architectures_of_a_server_are_read_from_its_package(own: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    lists = {
        "sglang": ("srt/models/a.py", "EntryClass = [\n    {},\n    LlamaForCausalLM,\n]\n"),
        "vllm": ("model_executor/models/registry.py", '_MODELS = {{\n    "{}": ("a", "b"),\n}}\n'),
    }
    both = [part for name in lists for part in (f"--{name}", str(python))]
    found = checked(str(own), *both)[1]
    assert {found[name][0] for name in ("SGLang", "vLLM")} == {"unknown"}
    assert found["vLLM"][1].endswith("python does not find the package vllm")
    for architecture, state in (("PhiForCausalLM", "no"), ("Qwen3ForCausalLM", "ok")):
        for name, (file, text) in lists.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "__init__.py").write_text("raise ImportError('it is not imported')")
            path.write_text(text.format(architecture))
        found = checked(str(own), *both)[1]
        assert {found[name][0] for name in ("SGLang", "vLLM")} == {state}
    assert found["SGLang"] == ("ok", "this version serves Qwen3ForCausalLM")
