"""`rollart bench weights`: new weights on their way to an engine that goes on generating.

A Qwen3 model of 102M random parameters; float32 masters, published in bfloat16 after real AdamW
updates on random tokens.

First the delta channel over learning rates, both ends here: what share of the bytes moves, and
whether what arrives is bit for bit what was published. Then each channel with an engine in a
process of its own that generates four answers at once all the time: its stall per swap, beside the
peer, which stops generating, fetches and copies the next version over the same channel, and goes
on; seconds to publish and to fetch, bytes, and how fast tokens come meanwhile. ``kv_on_swap`` is
``keep``, so that both stalls are of weights only.

Takes: ``pairs``, ``short`` (a tiny model, two channels). Gives: rows. Never: counts the first
version, which is whole on every channel.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import result, row, tell
from rollart_bench.skip import require
from rollart_bench.weight_sides import (
    Measured,
    Weights,
    WeightSideModel,
    measure,
    open_channel,
)
from rollart_core.runtime.inline import shared_folder

if TYPE_CHECKING:
    import torch

TAKES: Final = ("pairs", "short")

LARGE: Mapping[str, Any] = {
    "vocab_size": 18432,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SMALL: Mapping[str, Any] = {**LARGE, "hidden_size": 128, "intermediate_size": 256} | {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4)
MARKED_LR, MARKED_SHARE = 1e-6, 0.3
CHANNELS: Mapping[str, Mapping[str, Any]] = {
    "shared-memory": {"id": "shared-memory"},
    "disk": {"id": "disk"},
    "collective": {"id": "collective"},
    "delta over shared-memory": {"id": "delta"},
    "delta over collective": {"id": "delta", "over": "collective"},
}
SHORT_CHANNELS = ("shared-memory", "delta over collective")
FULL_EVERY = 20
STOPPED = "stop, fetch, copy, go on"
FULL = "all of it"


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short``: a tiny model, one pair, two of the channels; ``pairs``: how many swaps
            of each kind (2).

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("weights", options)
    require("torch", "transformers", extra="train")
    pairs = asked.integer("pairs", 1 if asked.short else 2)
    channels = SHORT_CHANNELS if asked.short else tuple(CHANNELS)
    calm_s = 0.3 if asked.short else 2.0
    shared = shared_folder("bench-weights")
    try:
        with tempfile.TemporaryDirectory() as folder:
            shape, num_tokens = (SMALL, 32) if asked.short else (LARGE, 64)
            model = WeightSideModel(shape, folder, num_tokens)
            name = f"{model.num_parameters / 1e6:.0f}M"
            rows, versions = _delta_rows(model, name, pairs, str(shared / "delta"))
            del model
            gc.collect()
            for channel in channels:
                where = Path(folder) / "disk" if channel == "disk" else shared / "channel"
                ends = (CHANNELS[channel], str(where), folder)
                got = asyncio.run(measure(*ends, versions, calm_s=calm_s))
                rows += _channel_rows(f"{name}, {channel}", got)
    finally:
        for left in sorted(shared.rglob("*"), reverse=True):
            left.unlink() if left.is_file() else left.rmdir()
        shared.rmdir()
    return result("weights", rows)


def _delta_rows(
    model: WeightSideModel, name: str, pairs: int, location: str
) -> tuple[list[dict[str, object]], list[Weights]]:
    """Measure the delta channel over learning rates; return the versions of the marked one too."""
    rows: list[dict[str, object]] = []
    versions: list[Weights] = []
    channel = {"id": "delta", "full_every": FULL_EVERY}
    publisher, reader = open_channel(channel, location), open_channel(channel, location)
    version, all_equal = 0, True
    try:
        for lr in LEARNING_RATES:
            model.begin(lr)
            shares, publish_s = [], []
            for step in range(1 + pairs * (2 if lr == MARKED_LR else 1)):
                publication = publisher.publish(version, model.published())
                got = dict(reader.fetch(version))
                all_equal &= _same(got, model)
                if lr == MARKED_LR:
                    versions.append(got)
                if step and version % FULL_EVERY:  # the others are whole
                    assert publication.moved_bytes is not None
                    shares.append(publication.moved_bytes / publication.num_bytes)
                    publish_s.append(publication.publish_s)
                version += 1
                model.train_step()
            rows.append(_share_row(name, lr, shares, publication.num_bytes))
            tell(f"lr {lr:g}: {mean(shares):.2%} of the bytes, {mean(publish_s):.2f} s to publish")
    finally:
        reader.close()
        publisher.close()
    rows.append(_equal_row(name, all_equal, version))
    return rows, versions


def _share_row(name: str, lr: float, shares: list[float], full: int) -> dict[str, object]:
    share, marked = mean(shares), lr == MARKED_LR
    return row(
        f"{name} bf16, delta after one AdamW update at lr {lr:g}",
        share * full / 1e6,
        full / 1e6,
        FULL,
        "MB a version",
        ratios=[1 / s for s in shares],
        mark=f"<= {MARKED_SHARE:.0%} of the bytes" if marked else None,
        meets_mark=max(shares) <= MARKED_SHARE if marked else None,
        required=marked,
    )


def _equal_row(name: str, all_equal: bool, num_versions: int) -> dict[str, object]:
    return row(
        f"{name} bf16, delta: versions that arrived bit for bit",
        num_versions if all_equal else 0,
        num_versions,
        FULL,
        "versions",
        mark="all",
        meets_mark=all_equal,
        required=True,
    )


def _same(got: Mapping[str, torch.Tensor], model: WeightSideModel) -> bool:
    import torch

    bits = torch.int16
    wanted = model.published()
    return all(torch.equal(got[n].view(bits), tensor.view(bits)) for n, tensor in wanted)


def _channel_rows(case: str, got: Measured) -> list[dict[str, object]]:
    stall_s, stopped_s = median(got.stall_s), median(got.stopped_s)
    fetch_s, publish_s = median(got.fetch_s), median(got.publish_s)
    tell(
        f"{case}: stall {stall_s * 1e3:.2f} ms (stopped: {stopped_s * 1e3:.0f} ms), publish "
        f"{publish_s:.2f} s, fetch {fetch_s:.2f} s, {median(got.moved_bytes) / 1e6:.1f} MB"
    )
    ratios = [peer / ours for peer, ours in zip(got.stopped_s, got.stall_s, strict=True)]
    return [
        row(
            f"{case}: stall of the engine per swap",
            stall_s * 1e3,
            stopped_s * 1e3,
            STOPPED,
            "ms",
            ratios=ratios,
            mark=10.0,
        ),
        row(
            f"{case}: moved to the engine per version",
            median(got.moved_bytes) / 1e6,
            got.num_bytes / 1e6,
            FULL,
            "MB",
        ),
        row(f"{case}: publish", publish_s, None, None, "s"),
        row(f"{case}: fetch while generating", fetch_s, stopped_s, STOPPED, "s"),
        row(
            f"{case}: generated while weights are fetched",
            got.busy_tokens_per_s,
            got.calm_tokens_per_s,
            "the same engine left alone",
            "tokens/s",
        ),
    ]
