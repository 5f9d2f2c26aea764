"""What fits, against figures worked out by hand from the published shapes of two models."""

from dataclasses import replace

import pytest

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import ModelShape, Pool
from rollart_planner.memory import (
    TrainingNumbers,
    engine_verdict,
    machine_verdict,
    rank_bytes,
    trainer_verdict,
)

DENSE = ModelShape(
    8_190_735_360, 36, 32, 8, 128, width=4096, num_outer_params=1_244_659_712, vocab_size=151_936
)
"""Qwen3-8B."""
MIXTURE = ModelShape(
    30_532_122_624,
    48,
    32,
    4,
    128,
    num_active_params=3_353_032_704,
    num_experts=128,
    experts_per_token=8,
    width=2048,
    num_outer_params=622_329_856,
    vocab_size=151_936,
)
"""Qwen3-30B-A3B."""
H100 = Pool("h100", "H100", 16, memory_bytes=80 * 10**9, per_node=8, host_memory_bytes=10**12)
TURNS = Workload(prefill_tokens=900, decode_tokens=100, turns=1)


def numbers(num_ranks: int, **changes) -> TrainingNumbers:
    given = {"num_tokens": 8192, "recomputes": True, **changes}
    return TrainingNumbers(num_ranks=num_ranks, **given)


def test_weights_and_cache_of_a_dense_model():
    assert DENSE.weight_bytes / 1e9 == pytest.approx(16.38, abs=0.005)
    # 2 (keys, values) x 36 layers x 8 heads x 128 x 2 bytes
    assert DENSE.kv_bytes_per_token == 147_456


def test_what_a_rank_keeps_of_a_dense_model():
    found = rank_bytes(DENSE, numbers(8))
    assert "copy before a step" not in found
    bounded = rank_bytes(DENSE, numbers(8, bounds_steps=True))
    assert bounded["copy before a step"] == found["weights"] + found["Adam's moments"]
    assert found["weights"] == found["gradients"] == pytest.approx(4 * 8_190_735_360 / 8)
    assert found["Adam's moments"] == pytest.approx(8.19e9, rel=1e-3)
    # gathered: twice 1.2447e9 in 2 bytes, and then the float32 sum of its gradient
    assert found["gathered"] == pytest.approx(2 * 2 * 1_244_659_712 + 4 * 1_244_659_712)
    # 36 inputs of 4096 in 2 bytes, and one layer: 2 (4 x 4096 + 3 x 4096 + 3 x 1024 + 4 f) and
    # 4 (3 x 4096 + 1024) bytes of norms; f = 12288 but for their weights, which are counted to it
    layer = 2 * (7 * 4096 + 3 * 1024 + 4 * 12288) + 4 * (3 * 4096 + 1024)
    assert found["activations"] == pytest.approx(8192 * (2 * 36 * 4096 + layer), rel=1e-3)
    # a chunk of logits, whose float32 form has 2^28 bytes, and the gradient of the head
    assert found["logits"] == pytest.approx(2**28 / 4 * 18 + 4 * 151_936 * 4096)
    assert "reference" not in found


def test_the_logits_of_a_small_vocabulary_are_computed_at_once():
    small = ModelShape(10**6, 3, 2, 1, 64, width=128, vocab_size=1000)
    found = rank_bytes(small, numbers(1, num_tokens=10_000))
    assert found["logits"] == 10_000 * 1000 * 18
    chunked = rank_bytes(small, numbers(1, num_tokens=10**6))
    assert chunked["logits"] == pytest.approx(2**28 / 4 * 18 + 4 * 1000 * 128)


def test_what_else_a_rank_may_keep():
    plain, more = rank_bytes(DENSE, numbers(8)), numbers(8, num_references=1, num_critics=1)
    both = rank_bytes(DENSE, more)
    assert both["reference"] == plain["weights"]
    assert both["Adam's moments"] == 2 * plain["Adam's moments"]
    kept = rank_bytes(DENSE, numbers(8, recomputes=False))["activations"]
    assert kept > 15 * plain["activations"] / 2  # 36 whole layers instead of one
    alone = rank_bytes(DENSE, numbers(1))
    assert alone["gathered"] == 2 * DENSE.num_params  # what autocast has cast


def test_a_gradient_of_a_small_model_is_kept_whole():
    small = ModelShape(10**8, 4, 4, 4, 64, width=256)
    large = ModelShape(10**9, 4, 4, 4, 64, width=256)
    per_layer = 10 / 4  # (3 x 2 + 4) bytes of a quarter of the parameters
    assert rank_bytes(small, numbers(2))["gathered"] == pytest.approx((per_layer + 4) * 10**8)
    assert rank_bytes(large, numbers(2))["gathered"] == pytest.approx(per_layer * 10**9)


def test_a_trainer_that_does_not_fit_is_told_how_many_ranks_would():
    verdict = trainer_verdict(MIXTURE, H100, numbers(4))
    assert not verdict.fits
    assert verdict.needed["weights"] == MIXTURE.num_params
    assert "set runtime.num_trainer_ranks to" in verdict.says
    ranks = int(verdict.says.split("num_trainer_ranks to ")[1].split()[0])
    assert trainer_verdict(MIXTURE, H100, numbers(ranks)).fits
    assert not trainer_verdict(MIXTURE, H100, numbers(ranks - 1)).fits
    assert trainer_verdict(MIXTURE, Pool("p", "x", 4), numbers(1)).fits  # nothing known: no verdict


def test_activations_that_do_not_fit_are_told_by_what():
    run = numbers(8, num_tokens=65_536, recomputes=False)
    verdict = trainer_verdict(DENSE, H100, run)
    assert not verdict.fits
    assert "activation_checkpointing to true" in verdict.says
    assert "max_tokens_per_microbatch and rollout.max_context_tokens to 4096" in verdict.says
    assert "num_trainer_ranks" not in verdict.says  # no number of ranks makes activations less


def engine(model: ModelShape, devices: int, rows: float, longest: int = 8192):
    return engine_verdict(
        model,
        H100,
        num_engines=2,
        devices=devices,
        rows={"e": (rows, TURNS)},
        longest=longest,
    )


def test_an_engine_holds_weights_and_the_rows_there_are():
    verdict = engine(DENSE, 1, 256)
    assert verdict.fits
    assert not verdict.says
    assert verdict.needed["KV cache"] == pytest.approx(128 * 1000 * 147_456)
    crowded = engine(DENSE, 1, 2048)
    assert crowded.fits
    assert "memory for 37% of its" in crowded.says  # (72 - 16.38) / (1024 x 0.147456)


def test_an_engine_that_does_not_fit_is_told_how_many_devices_would():
    large = ModelShape(70_000_000_000, 80, 64, 8, 128)
    verdict = engine(large, 1, 64)
    assert not verdict.fits
    assert "use 2 devices per engine (engine.tp_size)" in verdict.says
    assert engine(large, 2, 8, longest=1000).fits


def test_a_cache_head_is_on_each_device_at_least():
    halves, eighths = engine(MIXTURE, 2, 64), engine(MIXTURE, 8, 64)
    assert halves.needed["weights"] == MIXTURE.weight_bytes / 2
    assert eighths.needed["weights"] == MIXTURE.weight_bytes / 8
    assert eighths.needed["KV cache"] == halves.needed["KV cache"] / 2  # 4 heads over 8 devices


def test_of_several_ranks_none_loads_the_whole_model_into_its_machine():
    verdict = machine_verdict(MIXTURE, H100, 16)
    assert verdict is not None
    assert (verdict.count, verdict.fits) == (2, True)
    assert verdict.needed == {"exporting": 2 * MIXTURE.num_params}  # 61 GB, on one of them
    whole_files = replace(MIXTURE, bytes_per_value=0.01)
    more = machine_verdict(MIXTURE, H100, 16, num_versions=2)
    assert more.needed_bytes - verdict.needed_bytes == 2 * MIXTURE.weight_bytes
    reading = machine_verdict(whole_files, H100, 16)
    assert reading is not None
    assert reading.needed == {"loading": 8 * 4 * 151_936 * 2048 / 16}  # rows of the embedding
    small = Pool("p", "H100", 16, per_node=8, host_memory_bytes=50 * 10**9)
    refused = machine_verdict(MIXTURE, small, 16)
    assert refused is not None
    assert not refused.fits
    assert "exporting the model needs 61 GB" in refused.says
    assert "bfloat16" not in refused.says  # it is that already
    assert machine_verdict(MIXTURE, Pool("p", "x", 8), 8) is None


def test_one_rank_loads_the_whole_model_and_is_told_that_two_would_not():
    small = Pool("p", "H100", 16, per_node=8, host_memory_bytes=100 * 10**9)
    refused = machine_verdict(MIXTURE, small, 1)
    assert refused is not None
    assert refused.needed == {"loading": 4 * MIXTURE.num_params}
    assert "loading the model needs 122 GB" in refused.says
    assert "set runtime.num_trainer_ranks to 2 or more" in refused.says
    two = machine_verdict(MIXTURE, small, 2)
    assert two is not None
    assert two.fits


def test_ranks_without_devices_keep_their_shards_in_the_machine():
    cores = Pool("p", "cpu", 4, host_memory_bytes=100 * 10**9)
    verdict = machine_verdict(DENSE, cores, 4, on_host=True)
    assert verdict is not None
    assert verdict.needed == {
        "shards": 4 * DENSE.num_params,
        "exporting": 2 * DENSE.num_params,
    }
