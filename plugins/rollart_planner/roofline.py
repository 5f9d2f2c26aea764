"""Estimate the seconds of a turn on a device with the roofline of prefill and decode.

A step on a device takes the longer of two: its arithmetic at the device's FLOP/s, and its traffic
at the device's bytes/s (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009).

    arithmetic of n tokens, each attending to c others on average
        F(n, c) = n (2 P + 4 L H c)           P parameters that a token passes through, L layers,
                                              H = heads x head_dim
        2 P: one multiplication and one addition per parameter; 4 L H c: the products with keys and
        with values (Kaplan et al., arXiv 2001.08361, section 2.1, before the causal half)
    traffic of one step
        B = W + K (tokens of all rows in the cache)
        W bytes of the weights, read once per step (for a mixture of experts: of experts that any
        of its tokens uses); K = 2 L x kv_heads x head_dim x bytes_per_value bytes of keys and
        values per token (Pope et al., arXiv 2211.05102, section 2)
    plus ``step_s``, the engine's overhead per step

An engine over t devices (tensor parallel) is one device with t times the arithmetic, bandwidth and
memory. With more devices than KV heads, each has a copy of one head (same, section 3.3). The
communication between devices after each layer is not included.

Prefill and decode are separate steps, as in engines without chunked prefill. If they share steps
(arXiv 2403.02310), a real engine is somewhat faster than this estimate.

Takes: a model's shape, a pool's figures, a workload, a batch size. Gives: seconds of one device.
Never: measures anything. The figures of a pool are sustained rates, not peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import ModelShape, Pool
from rollart_core.runtime.workload import (
    cached_tokens,
    decode_context,
    held_tokens,
    trained_context,
    trained_tokens,
)

KV_SHARE = 0.9
"""Share of a device's memory for weights and KV cache; the engine needs the rest."""
MAX_BATCH = 256
"""Maximum rows that an engine decodes concurrently, the usual default of serving engines."""
TRAIN_BYTES_PER_PARAM = 16
"""Weights and gradients in 2 bytes, master weights and Adam's two moments in 4 (ZeRO, arXiv
1910.02054, section 3.1). Plain float32 needs the same. Activations are not included."""


@dataclass(frozen=True, slots=True)
class TurnTime:
    """Device seconds of a turn, and what bounds them."""

    prefill_s: float
    decode_s: float
    prefill_by_compute: bool
    decode_by_compute: bool

    @property
    def total_s(self) -> float:
        """The sum of both."""
        return self.prefill_s + self.decode_s


def flops(model: ModelShape, num_tokens: float, attended: float) -> float:
    """Return the FLOPs of ``num_tokens`` that attend to ``attended`` others on average."""
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * attended
    return num_tokens * (2 * model.active_params + attention)


def engine_pool(pool: Pool, num_devices: int) -> Pool:
    """Return a pool whose devices are engines over ``num_devices`` each; remainders stay idle."""
    if num_devices == 1:
        return pool
    nodes = pool.count // pool.per_node if pool.per_node else 0
    rest = pool.count - nodes * pool.per_node
    return replace(
        pool,
        count=(nodes * (pool.per_node // num_devices) if nodes else 0) + rest // num_devices,
        flops_per_s=num_devices * pool.flops_per_s,
        bytes_per_s=num_devices * pool.bytes_per_s,
        memory_bytes=num_devices * pool.memory_bytes,
    )


def engine_model(model: ModelShape, num_devices: int) -> ModelShape:
    """Return the model as an engine over several devices holds it: at least one KV head each."""
    return replace(model, num_kv_heads=max(model.num_kv_heads, num_devices))


def prefill_bounds(
    model: ModelShape, pool: Pool, new_tokens: float, cached: float, *, prompts: float = 1.0
) -> tuple[float, float]:
    """Return the seconds of one prompt's prefill, by arithmetic and by traffic.

    Args:
        model: The model.
        pool: The device.
        new_tokens: Tokens of the prompt that are not in the cache.
        cached: Tokens of the prompt that are in the cache.
        prompts: The number of prompts that share the step, and one read of the weights.
    """
    arithmetic = flops(model, new_tokens, cached + new_tokens / 2)
    weights = model.touched_bytes(prompts * new_tokens)
    traffic = weights / prompts + model.kv_bytes_per_token * (cached + new_tokens)
    return arithmetic / pool.flops_per_s, traffic / pool.bytes_per_s


def decode_bounds(model: ModelShape, pool: Pool, contexts: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of one decode step of these rows, by arithmetic and by traffic."""
    num_tokens, held = len(contexts), sum(contexts)
    arithmetic = flops(model, num_tokens, held / num_tokens if num_tokens else 0.0)
    traffic = model.touched_bytes(num_tokens) + model.kv_bytes_per_token * held
    return arithmetic / pool.flops_per_s, traffic / pool.bytes_per_s


def turn_time(model: ModelShape, pool: Pool, workload: Workload, batch: int) -> TurnTime:
    """Return the device seconds of a turn on a device that always decodes ``batch`` rows.

    Prefill gives a turn's first token, and each decode step gives one more. So each decode step
    ends ``batch / steps`` turns, whose successors arrive together. That many prompts share a
    prefill step, and at least one.
    """
    context = decode_context(workload)
    given = 1.0 if workload.prefill_tokens else 0.0
    steps = max(0.0, workload.decode_tokens - given)
    prompts = max(1.0, batch / max(1.0, steps))
    by_compute, by_traffic = prefill_bounds(
        model, pool, workload.prefill_tokens, cached_tokens(workload), prompts=prompts
    )
    step_compute, step_traffic = decode_bounds(model, pool, [context] * batch)
    prefill_s = max(by_compute, by_traffic) + pool.step_s / prompts
    decode_s = steps * (max(step_compute, step_traffic) + pool.step_s) / batch
    return TurnTime(
        prefill_s=prefill_s if workload.prefill_tokens else 0.0,
        decode_s=decode_s,
        prefill_by_compute=by_compute >= by_traffic,
        decode_by_compute=step_compute >= step_traffic,
    )


def max_batch(model: ModelShape, pool: Pool, workload: Workload) -> int:
    """Return how many rows fit in a device's memory, at most ``MAX_BATCH``; 0 if none fits.

    A pool without a memory figure is assumed to have enough.
    """
    if not pool.memory_bytes:
        return MAX_BATCH
    cache_bytes = KV_SHARE * pool.memory_bytes - model.weight_bytes
    row = model.kv_bytes_per_token * max(1.0, held_tokens(workload))
    return max(0, min(MAX_BATCH, int(cache_bytes / row)))


def training_s(
    model: ModelShape,
    pool: Pool,
    workload: Workload,
    *,
    recomputes: bool = False,
    num_references: int = 0,
) -> float:
    """Return the device seconds of training on a trajectory.

    It is three times the forward pass: one forward, and a backward of twice its cost (arXiv
    2001.08361, 2.1); plus one more forward if layers are recomputed (arXiv 2205.05198, section 5),
    and one of each model that only computes logprobs.
    """
    forward = flops(model, trained_tokens(workload), trained_context(workload))
    own = pool.moe_training_flops_per_s if model.num_experts else pool.training_flops_per_s
    return (3 + recomputes + num_references) * forward / (own or pool.flops_per_s)


def training_bytes(model: ModelShape, num_trained_params: int = 0) -> float:
    """Return the bytes of weights, gradients and optimizer state; of trained parameters if set."""
    trained = num_trained_params or model.num_params
    frozen = model.num_params if num_trained_params else 0
    return 4.0 * frozen + TRAIN_BYTES_PER_PARAM * trained


def training_fits(
    model: ModelShape, pool: Pool, num_ranks: int, num_trained_params: int = 0
) -> bool:
    """Return whether weights, gradients and optimizer state fit on ``num_ranks`` devices."""
    needed = training_bytes(model, num_trained_params) / num_ranks
    return not pool.memory_bytes or needed <= pool.memory_bytes
