"""The roofline against cases worked out by hand."""

from dataclasses import replace

import pytest

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import ModelShape, Pool
from rollart_core.runtime.workload import (
    cached_tokens,
    decode_context,
    held_tokens,
    total_tokens,
    trained_context,
    trained_tokens,
)
from rollart_planner import roofline
from rollart_planner.devices import DEVICES, find_device

# 10^9 parameters in 2 bytes; 10 layers x 10 heads of 100; 2 x 10 x 1 x 100 x 2 = 4,000 bytes of KV
MODEL = ModelShape(10**9, 10, 10, 1, 100)
POOL = Pool("p", "x", 1, flops_per_s=1e14, bytes_per_s=1e12, memory_bytes=4 * 10**9)


def test_bytes_of_a_model():
    assert MODEL.weight_bytes == 2e9
    assert MODEL.kv_bytes_per_token == 4000


def test_tokens_of_a_trajectory_turn_by_turn():
    workload = Workload(prefill_tokens=100, decode_tokens=20, turns=3)
    assert total_tokens(workload) == 360
    # before the turns 0, 120, 240; while decoding, in the mean, 110, 230, 350; after 120, 240, 360
    assert cached_tokens(workload) == 120
    assert decode_context(workload) == 230
    assert held_tokens(workload) == 240
    assert (trained_tokens(workload), trained_context(workload)) == (360, 180)


def test_tokens_of_a_trajectory_whose_turns_are_rows():
    workload = Workload(prefill_tokens=100, decode_tokens=20, turns=3, rows=3)
    # rows of 120, 240 and 360 tokens, which attend to 60, 120 and 180 others in the mean
    assert trained_tokens(workload) == 720
    assert trained_context(workload) == pytest.approx((120 * 60 + 240 * 120 + 360 * 180) / 720)
    one, several = [roofline.training_s(MODEL, POOL, replace(workload, rows=n)) for n in (1, 3)]
    assert several == pytest.approx(2 * one, rel=0.01)


def test_arithmetic_of_a_token():
    # 2 x 10^9 for the weights, 4 x 10 x 1000 for each token it attends to
    assert roofline.flops(MODEL, 1, 0) == 2e9
    assert roofline.flops(MODEL, 3, 500) == 3 * (2e9 + 40_000 * 500)


def test_a_long_prompt_is_bound_by_arithmetic_and_a_short_one_by_bandwidth():
    arithmetic, traffic = roofline.prefill_bounds(MODEL, POOL, 1000, 0)
    assert arithmetic == pytest.approx(1000 * (2e9 + 40_000 * 500) / 1e14)
    assert traffic == pytest.approx((2e9 + 4000 * 1000) / 1e12)
    assert arithmetic > traffic
    arithmetic, traffic = roofline.prefill_bounds(MODEL, POOL, 10, 0)
    assert arithmetic < traffic
    shared = roofline.prefill_bounds(MODEL, POOL, 10, 0, prompts=4)[1]
    assert shared == pytest.approx((2e9 / 4 + 4000 * 10) / 1e12)


def test_decoding_reads_the_weights_once_for_all_rows():
    arithmetic, traffic = roofline.decode_bounds(MODEL, POOL, [100, 300])
    assert traffic == pytest.approx((2e9 + 4000 * 400) / 1e12)
    assert arithmetic == pytest.approx(2 * (2e9 + 40_000 * 200) / 1e14)
    one = roofline.turn_time(MODEL, POOL, Workload(0, 50, 1), 1)
    ten = roofline.turn_time(MODEL, POOL, Workload(0, 50, 1), 10)
    assert one.prefill_s == 0
    assert one.decode_s == pytest.approx(50 * (2e9 + 4000 * 25) / 1e12)
    assert ten.decode_s == pytest.approx(50 * (2e9 / 10 + 4000 * 25) / 1e12)
    assert not one.decode_by_compute
    first_by_prefill = roofline.turn_time(MODEL, POOL, Workload(1000, 50, 1), 1)
    assert first_by_prefill.decode_s == pytest.approx(49 * (2e9 + 4000 * 1025) / 1e12)
    assert roofline.turn_time(MODEL, POOL, Workload(0, 50, 1), 256).decode_by_compute


def test_the_batch_is_what_memory_holds_beside_the_weights():
    # 0.9 x 4 GB - 2 GB = 1.6 GB of rows of 4,000 bytes x 1,600 tokens
    assert roofline.max_batch(MODEL, POOL, Workload(1500, 100, 1)) == 250
    assert roofline.max_batch(MODEL, POOL, Workload(1, 1, 1)) == roofline.MAX_BATCH
    small = Pool("p", "x", 1, 1e14, 1e12, memory_bytes=2 * 10**9)
    assert roofline.max_batch(MODEL, small, Workload(1, 1, 1)) == 0
    assert roofline.max_batch(MODEL, Pool("p", "x", 1, 1, 1), Workload()) == roofline.MAX_BATCH


def test_training_takes_three_forward_passes_and_16_bytes_a_parameter():
    workload = Workload(100, 100, 5)
    assert roofline.training_s(MODEL, POOL, workload) == pytest.approx(
        3 * 1000 * (2e9 + 40_000 * 500) / 1e14
    )
    assert not roofline.training_fits(MODEL, POOL, 3)
    assert roofline.training_fits(MODEL, POOL, 4)


@pytest.mark.parametrize(
    "name", ["h100", "H100-SXM", "NVIDIA H100 SXM", "h100_sxm", "NVIDIA H100 80GB HBM3"]
)
def test_devices_are_found_however_they_are_written(name):
    assert find_device(name) is DEVICES["H100-SXM"]
    assert find_device("abacus") is None


def test_what_is_rich_in_arithmetic_and_what_in_bandwidth():
    balance = {name: d.flops_per_s / d.bytes_per_s for name, d in DEVICES.items() if d.bytes_per_s}
    assert balance["H20"] < balance["A100-80GB"] < balance["H200"] < balance["H100-SXM"]


# 10^9 parameters, of which a token goes through 280 million: shared + X / 10 = 0.28, shared + X = 1
MIXTURE = ModelShape(
    10**9, 10, 10, 1, 100, num_active_params=280_000_000, num_experts=10, experts_per_token=1
)


def test_a_mixture_computes_with_what_a_token_goes_through_and_holds_all():
    assert MIXTURE.expert_params == pytest.approx(800_000_000)
    assert MIXTURE.weight_bytes == 2e9
    assert roofline.flops(MIXTURE, 3, 500) == 3 * (2 * 280e6 + 40_000 * 500)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1.0), (2, 1.9), (3, 2.71), (1000, 10.0)])
def test_a_step_reads_the_experts_that_its_tokens_go_through(tokens, experts):
    # 10 (1 - 0.9^n) of 10 experts of 80 million, and 200 million that all share
    by_hand = 2 * (200e6 + experts * 80e6)
    assert MIXTURE.touched_bytes(tokens) == pytest.approx(by_hand)
    traffic = roofline.decode_bounds(MIXTURE, POOL, [100.0] * tokens)[1]
    assert traffic == pytest.approx((by_hand + 4000 * 100 * tokens) / 1e12)


def test_an_engine_over_several_devices_is_one_of_their_sum():
    pool = Pool("p", "x", 16, 1e14, 1e12, memory_bytes=10**9, per_node=8)
    three = roofline.engine_pool(pool, 3)
    assert three.count == 4  # two of each machine, whose other two devices are idle
    assert (three.flops_per_s, three.bytes_per_s, three.memory_bytes) == (3e14, 3e12, 3 * 10**9)
    assert roofline.engine_pool(Pool("p", "x", 7), 3).count == 2
    assert roofline.engine_model(MODEL, 4).kv_bytes_per_token == 4 * MODEL.kv_bytes_per_token
    assert roofline.max_batch(MODEL, pool, Workload(1500, 100, 1)) == 0
    assert roofline.max_batch(MODEL, three, Workload(1500, 100, 1)) == 109  # 0.7 GB / 6.4 MB


def test_what_is_computed_again_is_a_fourth_pass():
    workload = Workload(100, 100, 5)
    three = roofline.training_s(MODEL, POOL, workload)
    assert roofline.training_s(MODEL, POOL, workload, recomputes=True) == pytest.approx(
        three * 4 / 3
    )


def test_models_that_only_compute_logprobs_are_a_pass_each():
    workload = Workload(100, 100, 5)
    three = roofline.training_s(MODEL, POOL, workload)
    assert roofline.training_s(MODEL, POOL, workload, num_references=2) == pytest.approx(
        three * 5 / 3
    )


def test_training_has_its_own_rate_for_dense_models_and_mixtures():
    pool = replace(POOL, training_flops_per_s=POOL.flops_per_s / 2, moe_training_flops_per_s=1e13)
    workload = Workload(100, 100, 5)
    dense, mixture = [roofline.training_s(m, POOL, workload) for m in (MODEL, MIXTURE)]
    assert roofline.training_s(MODEL, pool, workload) == pytest.approx(2 * dense)
    assert roofline.training_s(MIXTURE, pool, workload) == pytest.approx(10 * mixture)
    # an engine is as fast as before
    assert roofline.turn_time(MODEL, pool, workload, 8) == roofline.turn_time(
        MODEL, POOL, workload, 8
    )
