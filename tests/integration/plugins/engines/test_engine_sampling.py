"""Keyed sampling: statistics, edges, and both ways of drawing."""

import numpy as np
import pytest
import torch

from rollart_cpu.inference.kernels import load_kernels
from rollart_plugins.engines.requests import Draws, sample, uniforms

WAYS = [pytest.param(False, id="torch"), pytest.param(True, id="native")]


def draws(temperatures, keys=None, counters=None) -> Draws:
    n = len(temperatures)
    return Draws(
        np.array(temperatures, np.float32),
        np.array(range(n) if keys is None else keys, np.uint64),
        np.array([0] * n if counters is None else counters, np.uint64),
    )


def need(native: bool) -> None:
    if native and load_kernels() is None:
        pytest.skip("no C compiler")


def test_splitmix64_is_the_published_one():
    # the first outputs of the reference generator for the state 1234567
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(np.full(3, 1234567, np.uint64), np.arange(3, dtype=np.uint64))
    assert got.tolist() == [((k >> 16) + 0.5) / 2**48 for k in known]


def test_uniforms_are_uniform_along_keys_and_counters():
    keys = np.repeat(np.arange(200, dtype=np.uint64), 100)
    u = uniforms(keys, np.tile(np.arange(100, dtype=np.uint64), 200))
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, 0.1%
    grid = u.reshape(200, 100)
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("native", WAYS)
def test_frequencies_follow_the_scaled_softmax(native):
    need(native)
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -float(3)]]).repeat(20_000, 1)
    tokens, logprobs = sample(logits, draws([0.7] * 20_000), native=native)
    want = (logits[0] / 0.7).log_softmax(-1)
    got = np.bincount(tokens, minlength=5) / 20_000
    assert np.abs(got - want.exp().numpy()).max() < 0.012
    assert np.abs(np.array(logprobs) - want[tokens].numpy()).max() < 1e-5


@pytest.mark.parametrize("native", WAYS)
def test_zero_temperature_is_greedy_with_logprobs_of_one(native):
    need(native)
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = sample(logits, draws([0.0] * 7), native=native)
    assert tokens == logits.argmax(-1).tolist()
    assert np.allclose(logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-5)


@pytest.mark.parametrize("native", WAYS)
def test_impossible_tokens_are_never_drawn(native):
    need(native)
    logits = torch.full((2000, 600), -200.0)
    logits[:, [3, 599]] = 5.0
    tokens, _ = sample(logits, draws([1.0] * 2000), native=native)
    assert set(tokens) == {3, 599}


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_said_so(native, bad):
    need(native)
    logits = torch.zeros(3, 50)
    logits[1, 17] = bad
    tokens, _ = sample(logits, draws([1.0, 1.0, 0.0]), native=native)
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


def test_both_ways_draw_the_same():
    need(True)
    logits = torch.randn(200, 1024, generator=torch.Generator().manual_seed(1)) * 2
    how = draws([1.0, 0.5, 0.0, 1.3] * 50)
    tokens, logprobs = sample(logits, how, native=True)
    others, other_logprobs = sample(logits, how, native=False)
    assert tokens == others
    assert np.abs(np.array(logprobs) - np.array(other_logprobs)).max() < 1e-5
