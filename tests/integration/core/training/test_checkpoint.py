"""Checkpoints: what is loaded goes on as if nothing had happened; nothing half-written stays."""

from pathlib import Path

import pytest
import torch
from support.model_families import make_model_of
from support.small_models import make_groups, make_trainer, save_model

from rollart_algorithms.grpo import GRPO
from rollart_core.errors import ConfigError
from rollart_core.training import checkpoint
from rollart_core.training.trainer import load_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_resumed_trainer_goes_on_bit_for_bit(
    model_path: str, tmp_path: Path, kl_coef: float
) -> None:
    def trainer():  # type: ignore[no-untyped-def]
        return make_trainer(model_path, GRPO(kl_coef=kl_coef), lr=1e-2, warmup_train_steps=3)

    first, second = trainer(), trainer()
    first.train_batch(make_groups(seed=0), 0)
    first.save(str(tmp_path / "c"), policy_version=1)
    assert second.load(str(tmp_path / "c")) == (1, 1)
    for seed in (1, 2):
        a = first.train_batch(make_groups(seed=seed), seed)[0]
        b = second.train_batch(make_groups(seed=seed), seed)[0]
        assert a.train_step == b.train_step
        for name in ("loss", "grad_norm", "lr"):
            assert a.metrics[name] == b.metrics[name]


def test_saving_again_replaces_the_whole(model_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(model_path)
    for version in (1, 2):
        trainer.save(str(tmp_path / "c"), policy_version=version, train_step=10 * version)
    assert trainer.load(str(tmp_path / "c")) == (2, 20)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_save_that_breaks_leaves_the_old_checkpoint(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model_path)
    trainer.save(str(tmp_path / "c"), policy_version=1)

    def breaks(state: object, checkpoint_id: Path, **_: object) -> None:
        checkpoint_id.mkdir()
        (checkpoint_id / "half").write_text("")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "dcp_save", breaks)
        with pytest.raises(OSError, match="disk full"):
            trainer.save(str(tmp_path / "c"), policy_version=2)
    assert trainer.load(str(tmp_path / "c"))[0] == 1
    trainer.save(str(tmp_path / "c"), policy_version=3)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_what_a_killed_trainer_left_half_written_is_removed(
    model_path: str, tmp_path: Path
) -> None:
    for name, content in ((".v1.part", "__0_0.distcp"), (".other.part", "notes")):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).write_text("half")
    (tmp_path / ".file.part").write_text("somebody else's")
    make_trainer(model_path).save(str(tmp_path / "v2"), policy_version=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".file.part", ".other.part", "v2"]


def test_what_is_no_checkpoint_or_of_another_model_is_named(
    model_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(model_path)
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        trainer.load(str(tmp_path / "nowhere"))
    trainer.save(str(tmp_path / "c"), policy_version=1)
    other = make_trainer(save_model(tmp_path / "other", num_hidden_layers=3))
    with pytest.raises(ConfigError, match="not of this model"):
        other.load(str(tmp_path / "c"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_loads_with_its_tokenizer(
    model_path: str, tmp_path: Path, dtype: str
) -> None:
    from transformers import AutoConfig

    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "unrelated.bin").write_text("no")
    trainer = make_trainer(model_path, dtype=dtype, lr=1e-2)
    trainer.train_batch(make_groups(), 0)
    trainer.export_hf(str(tmp_path / "hf"), str(source))
    loaded = dict(load_model(str(tmp_path / "hf")).named_parameters())
    for name, p in trainer._model.named_parameters():
        assert torch.equal(loaded[name], p.to(getattr(torch, dtype)).float())
    assert str(AutoConfig.from_pretrained(tmp_path / "hf").dtype) == f"torch.{dtype}"
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert not (tmp_path / "hf" / "unrelated.bin").exists()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("__0_0.distcp", "truncated"),
        ("__0_0.distcp", "changed"),
        ("__0_0.distcp", "gone"),
        (".metadata", "truncated"),
        (".metadata", "changed"),
        ("checksums.json", "truncated"),
    ],
)
def test_a_damaged_checkpoint_says_which_file_and_how_to_mend_it(
    model_path: str, tmp_path: Path, name: str, how: str
) -> None:
    trainer = make_trainer(model_path)
    trainer.save(str(tmp_path / "c"), policy_version=1)
    file = tmp_path / "c" / name
    content = file.read_bytes()
    half = len(content) // 2
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:half] if how == "truncated" else content[:half] + b"\0" * half)
    with pytest.raises(ConfigError, match=rf"c/{name} is damaged .*remove the folder c to"):
        trainer.load(str(tmp_path / "c"))


@pytest.mark.parametrize("model_type", ["glm4_moe", "nemotron_h"])
def test_an_exported_folder_has_the_routing_biases_of_experts(
    model_type: str, tmp_path: Path
) -> None:
    model = make_model_of(model_type)
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.copy_(torch.rand_like(bias))
    tensors = {n: t.bfloat16() for n, t in checkpoint.named_tensors(model).items()}
    checkpoint.export_hf(str(tmp_path / "hf"), model, tensors, None)
    loaded = dict(load_model(str(tmp_path / "hf")).named_buffers())
    assert biases
    for name, bias in biases.items():
        torch.testing.assert_close(loaded[name], bias)
