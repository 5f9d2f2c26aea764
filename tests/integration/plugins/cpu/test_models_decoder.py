"""Our decoder and the adapter beside transformers' own forward."""

from functools import wraps
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine_models import VOCAB, make_model, save

from rollart_core.errors import ConfigError
from rollart_cpu.inference import decoder
from rollart_cpu.inference.decoder import Decoder, RunnerOptions, cache_name, load_runner
from rollart_cpu.inference.kernels import load_kernels
from rollart_cpu.inference.runner import TokenBatch

WAYS = {
    "native": {"kernels": "native"},
    "torch": {"kernels": "torch"},
    "native fixed": {"kernels": "native", "deterministic": True},
    "torch fixed": {"kernels": "torch", "deterministic": True},
    "transformers": {"decoder": "transformers"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in ("qwen3", "qwen2", "llama", "gpt2"):
        model = make_model(family)
        made[family] = (model, save(model, tmp_path_factory.mktemp(family)))
    return made


def options(way: str, **more) -> RunnerOptions:
    if "native" in way and load_kernels() is None:
        pytest.skip("no C compiler")
    return RunnerOptions(num_slots=6, max_tokens=130, max_batch_tokens=256, **WAYS[way], **more)


def forward(runner, rows, segments) -> torch.Tensor:
    """Logits of the last row of each (row, start, stop); row ``i`` lives in slot ``i + 1``."""
    tokens = np.concatenate([rows[i, a:b].numpy() for i, a, b in segments])
    columns = [[i + 1 for i, _, _ in segments], [a for _, a, _ in segments]]
    columns += [[b - a for _, a, b in segments], range(len(segments))]
    return runner.forward(TokenBatch(tokens, *(np.array(c, np.int64) for c in columns))).clone()


STEPS = [
    [(0, 0, 20), (1, 0, 33)],
    [(0, 20, 21), (2, 0, 50), (1, 33, 34)],
    [(2, 50, 51), (0, 21, 22), (1, 34, 35)],
    [(0, 22, 100), (1, 35, 36)],
    [(1, 10, 40)],
]


CASES = [(f, w) for f in ("qwen3", "qwen2", "llama") for w in WAYS]


@pytest.mark.parametrize(("family", "way"), [*CASES, ("gpt2", "transformers")])
def test_logits_are_those_of_transformers(folders, family, way):
    model, folder = folders[family]
    runner = load_runner(folder, options(way))
    assert isinstance(runner, Decoder) == (way != "transformers")
    rows = torch.randint(0, VOCAB, (3, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(rows).logits
    for segments in STEPS:
        got = forward(runner, rows, segments)
        assert torch.allclose(got, torch.stack([want[i, b - 1] for i, _, b in segments]), atol=1e-4)
    runner.copy_prefix(3, 2, 45)
    assert torch.allclose(
        forward(runner, rows[[0, 2, 2]], [(1, 45, 51)])[0], want[2, 50], atol=1e-4
    )


@pytest.fixture
def threads(request):
    """How many threads compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("worth", [0, 10**9, decoder.FLOPS_WORTH_THREADS])
@pytest.mark.parametrize("way", ["native", "torch"])
def test_logits_of_several_threads_are_those_of_transformers(
    folders, way, worth, threads, monkeypatch
):
    monkeypatch.setattr(decoder, "FLOPS_WORTH_THREADS", worth)
    test_logits_are_those_of_transformers(folders, "qwen3", way)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("way", ["native fixed", "torch fixed"])
def test_a_row_has_the_same_bits_however_it_is_computed(folders, way, threads):
    runner = load_runner(folders["qwen3"][1], options(way))
    rows = torch.randint(0, VOCAB, (1, 100), generator=torch.Generator().manual_seed(2))
    rows = torch.cat((rows, rows, rows.flip(1)))
    whole = forward(runner, rows, [(0, 0, 100)])[0]
    chunks = [(0, 37), (37, 38), (38, 41), (41, 90), (90, 99), (99, 100)]
    for a, b in chunks:
        pieces = forward(runner, rows, [(2, 0, a // 3 + 1), (1, a, b)])
    assert torch.equal(pieces[1], whole)


def test_weights_are_swapped_whole_or_not_at_all(folders):
    _, folder = folders["qwen3"]
    runner = load_runner(folder, options("torch"))
    rows = torch.randint(0, VOCAB, (1, 10))
    old = forward(runner, rows, [(0, 0, 10)])
    other = make_model("qwen3", seed=5)
    state = {k: v for k, v in other.state_dict().items() if k != "lm_head.weight"}
    for broken, said in (
        ({k: v for k, v in state.items() if "layers.1.mlp.up" not in k}, "lack 1"),
        (state | {"model.odd": torch.zeros(1)}, "model.odd"),
        (state | {"model.norm.weight": torch.zeros(3)}, "wants"),
    ):
        with pytest.raises(ValueError, match=said):
            runner.load(broken.items())
        assert torch.equal(forward(runner, rows, [(0, 0, 10)]), old)
    assert runner.load(state.items()) == sum(t.nbytes for t in state.values())
    with torch.no_grad():
        want = other(rows).logits[0, -1]
    assert torch.allclose(forward(runner, rows, [(0, 0, 10)])[0], want, atol=1e-4)


def test_bfloat16_weights_are_multiplied_in_float32_on_a_cpu(folders):
    _, folder = folders["qwen3"]
    runner = load_runner(folder, options("torch", dtype="bfloat16"))
    rows = torch.randint(0, VOCAB, (1, 10))
    rounded = make_model("qwen3")
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
        want = rounded(rows).logits[0, -1]
    assert torch.allclose(forward(runner, rows, [(0, 0, 10)])[0], want, atol=1e-4)


def test_bfloat16_all_the_way(folders):
    _, folder = folders["qwen3"]
    runner = load_runner(folder, options("torch", dtype="bfloat16", compute_dtype="bfloat16"))
    rows = torch.randint(0, VOCAB, (1, 10), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = make_model("qwen3")(rows).logits[0, -1].softmax(-1)
    got = forward(runner, rows, [(0, 0, 10)])[0].softmax(-1)
    assert (got - want).abs().sum() < 0.1


def test_a_path_that_is_no_model_is_said_so(tmp_path, folders):
    with pytest.raises(ConfigError, match="there is no folder"):
        load_runner(str(tmp_path / "nowhere"), options("torch"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_runner(str(tmp_path), options("torch"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model_type"):
        load_runner(str(tmp_path), options("torch"))
    (tmp_path / "config.json").write_bytes(Path(folders["qwen3"][1], "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not safe tensors at all")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_runner(str(tmp_path), options("torch"))


def test_a_cache_too_small_for_one_context_is_refused(folders):
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        load_runner(folders["qwen3"][1], options("torch", kv_cache_bytes=1000))
    row = 130 * 2 * 3 * 2 * 16 * 4
    assert load_runner(folders["qwen3"][1], options("torch", kv_cache_bytes=3 * row)).num_slots == 3


class _OwnCode(torch.nn.Module):
    """A model whose code is older than the argument ``cache``."""

    def forward(self, input_ids, past_key_values=None, **options):
        return input_ids, past_key_values


class _Wrapped(torch.nn.Module):
    """A model whose forward is decorated, as those of transformers are."""

    @wraps(lambda self, input_ids, cache=None, **options: None)
    def forward(self, *args, **options):
        return args, options


def test_the_cache_goes_by_the_name_that_the_model_takes():
    assert cache_name(_OwnCode()) == "past_key_values"
    assert cache_name(_Wrapped()) == "cache"
