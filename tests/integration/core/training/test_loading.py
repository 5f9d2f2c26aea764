"""What a rank reads of a model's files is what transformers loads, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import save_model, small_mixture
from torch import nn

from rollart_core.errors import ConfigError
from rollart_core.models.weights import TensorFiles, weight_files
from rollart_core.training import loading
from rollart_core.training.loading import Unfit, empty_model, load_model, recipes


def filled(path: str, num_ranks: int) -> nn.Module:
    """Fill a model without content, the rows of one rank after the other."""
    model = empty_model(path)
    with contextlib.closing(TensorFiles(weight_files(Path(path)))) as files:
        for name, recipe in recipes(model, files).items():
            empty = model.state_dict(keep_vars=True)[name]
            whole = torch.full(empty.shape, torch.nan)
            cuts = whole.chunk(num_ranks) if whole.dim() else [whole]
            first = 0
            for rows in cuts:
                recipe.fill(files, rows, first)
                first += len(rows) if whole.dim() else 0
            put(model, empty, whole)
    return model


def put(model: nn.Module, empty: torch.Tensor, whole: torch.Tensor) -> None:
    """Put a tensor wherever the model has this one without content."""
    parameter = nn.Parameter(whole)
    for module in model.modules():
        for name, own in list(module._parameters.items()):
            if own is empty:
                module._parameters[name] = parameter
        for name, own in list(module._buffers.items()):
            if own is empty:
                module._buffers[name] = whole


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        one, other = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert list(one) == list(other)  # a tied one only once
        for name, tensor in other.items():
            assert one[name].dtype == tensor.dtype, name
            assert torch.equal(one[name], tensor), name


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mixture"])
def test_rows_of_ranks_are_the_whole_model(
    tmp_path: Path, architecture: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BLOCK_BYTES", 1000)  # several rows, not all
    path = (
        small_mixture(tmp_path) if architecture == "mixture" else save_model(tmp_path, architecture)
    )
    torch.manual_seed(5)
    random = torch.get_rng_state()
    assert_same(filled(path, num_ranks), load_model(path))
    assert torch.equal(torch.get_rng_state(), random)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 1) -> str:
    """Write other tensors into a model's folder."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)
    where = {name: f"part-{n % num_files}.safetensors" for n, name in enumerate(tensors)}
    for file in set(where.values()):
        some = {name: t for name, t in tensors.items() if where[name] == file}
        save_file(some, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.mark.parametrize("case", ["bfloat16 in three files", "fused", "no prefix"])
def test_files_that_are_written_otherwise_make_the_same_model(tmp_path: Path, case: str) -> None:
    model = load_model(small_mixture(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    if case == "bfloat16 in three files":
        path = rewrite(tmp_path, {n: t.bfloat16() for n, t in tensors.items()}, 3)
        model = load_model(path)
    elif case == "fused":
        path = rewrite(tmp_path, dict(model.state_dict()))
    else:
        path = rewrite(tmp_path, {n.removeprefix("model."): t for n, t in tensors.items()})
    assert_same(load_model(path), model)
    assert_same(filled(path, 2), model)


@pytest.mark.parametrize("case", ["the head alone", "both", "both, not alike"])
def test_tied_weights_are_read_under_either_name(tmp_path: Path, case: str) -> None:
    path = save_model(tmp_path)  # tied
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors[embedding].clone()
    if case == "the head alone":
        del tensors[embedding]
    elif case == "both, not alike":
        tensors["lm_head.weight"][-1, -1] += 1
    rewrite(tmp_path, tensors)
    if case == "both, not alike":  # transformers unties them
        with pytest.raises(Unfit, match=r"have separate values for lm_head.weight"):
            filled(path, 2)
    else:
        assert_same(filled(path, 2), load_model(path))


def test_what_copying_and_stacking_does_not_make_is_left_to_transformers(tmp_path: Path) -> None:
    path = small_mixture(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    up = "model.layers.0.mlp.experts.3.up_proj.weight"
    for change, why in {
        "missing": "different shapes in the files",
        "narrow": "different shapes in the files",
        "short": r"model.norm.weight is \(31,\) in the files instead of \(32,\)",
        "none": "the files have no model.norm.weight",
    }.items():
        others = dict(tensors)
        if change == "missing":
            del others[up]
        elif change == "narrow":
            others[up] = others[up][:-1].contiguous()
        elif change == "short":
            others["model.norm.weight"] = others["model.norm.weight"][:-1].contiguous()
        else:
            del others["model.norm.weight"]
        rewrite(tmp_path, others)
        with pytest.raises(Unfit, match=why):
            filled(path, 1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unfit, match="its config has quantization_config"):
        empty_model(path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = Path(save_model(tmp_path)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors' cannot be read .* again"):
        TensorFiles([file])
    with pytest.raises(ConfigError, match=r"none.safetensors' cannot be read"):
        TensorFiles([tmp_path / "none.safetensors"])


def run_ranks(folder: Path, paths: list[str]) -> None:
    """Load models on two ranks; see ``loading_ranks.py``."""
    program = Path(__file__).parents[3] / "support/loading_ranks.py"
    done = subprocess.run(
        [sys.executable, program, folder, "2", *paths],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # what forks has one thread
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_rank_of_two_holds_more_than_its_shards_and_a_tensor(tmp_path: Path) -> None:
    """What torch's allocator gave out is counted, which sees the old loader too.

    Files are in bfloat16, or what is mapped of them would be the float32 model already.
    """
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128}
    paths = [
        save_model(tmp_path / "tied", vocab_size=301, **sizes),
        small_mixture(tmp_path / "mixture", num_experts=9, vocab_size=301, **sizes),
    ]
    for path in paths:
        tensors = load_file(Path(path) / "model.safetensors")
        rewrite(Path(path), {n: t.bfloat16() for n, t in tensors.items()})
    whole_only = shutil.copytree(paths[0], tmp_path / "bin")
    torch.save(load_file(whole_only / "model.safetensors"), whole_only / "pytorch_model.bin")
    (whole_only / "model.safetensors").unlink()
    run_ranks(tmp_path, [*paths, str(whole_only)])
    for n, path in enumerate([*paths, str(whole_only)]):
        model = load_model(path)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        num_bytes = 4 * sum(p.numel() for p in model.parameters())
        largest = 4 * max(p.numel() for p in model.parameters())
        for rank in range(2):
            new = torch.load(tmp_path / f"shards{n}-{rank}.pt")
            old = torch.load(tmp_path / f"whole_first{n}-{rank}.pt")
            for found in (new, old):
                assert found["is_tied"] == (n != 1)
                assert list(found["whole"]) == list(tensors)
                for name, tensor in tensors.items():
                    assert torch.equal(found["whole"][name], tensor), (path, rank, name)
            allowed = new["shard_bytes"] + largest
            assert allowed < 0.8 * num_bytes  # or nothing would be shown
            assert old["peak_bytes"] > num_bytes
            if path == str(whole_only):
                assert new["peak_bytes"] > num_bytes
            else:
                assert new["peak_bytes"] < allowed
