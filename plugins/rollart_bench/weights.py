"""`rollart bench weights`: the transfer of new weights to an engine that continues to generate.

The model is a Qwen3 model of 102M random parameters, with float32 masters. Weights are published in
bfloat16 after real AdamW updates on random tokens.

First, the delta channel runs with several learning rates, with both ends in this process. It
measures the share of bytes that is moved, and whether the result is bitwise equal to what was
published. Then each channel runs with an engine in a separate process that always generates four
answers concurrently. It measures the stall per swap, seconds to publish and to fetch, bytes, and
the token rate meanwhile. The peer stops generating, fetches and copies the next version over the
same channel, and continues. ``kv_on_swap`` is ``keep``, so that both stalls are of weights only.

With ``sglang``, real SGLang servers get new weights instead. A server is launched for each channel,
because the channel decides how weights reach it. Rows are the stall, and the growth of the memory
of the engine's process:

    collective                 the server receives the trainer's broadcast
    shared-memory              the server loads the channel's files
    delta over shared-memory   the engine's process sends pickled tensors in requests: the peer

Takes: ``pairs``, ``sglang``, ``short`` (a tiny model, two channels). Gives: rows. Never: counts the
first version, which is complete on every channel.
"""

from __future__ import annotations

import asyncio
import gc
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_core.contracts.inference import GenerateRequest, InferenceEngine, WeightSwap
from rollart_core.contracts.weights import WeightChannel
from rollart_core.plugins.registry import build
from rollart_core.runtime.inline import shared_folder
from rollart_core.runtime.process import WorkerProcess

if TYPE_CHECKING:
    import torch

TAKES: Final = ("pairs", "sglang", "short")

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

ENGINE = f"{__name__}:make_engine"
NUM_STREAMS = 4
"""Answers that are generated concurrently while weights change."""
PROMPT_TOKENS, NEW_TOKENS = 16, 64

Weights = dict[str, "torch.Tensor"]


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short``: a tiny model, one pair, two of the channels; ``pairs``: the number of
            swaps of each kind (2); ``sglang``: the command of an SGLang server, such as
            ``/opt/sglang/bin/python -m sglang.launch_server``, to measure that instead.

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("weights", options)
    require("torch", "transformers", extra="train")
    pairs = asked.integer("pairs", 1 if asked.short else 2)
    channels = SHORT_CHANNELS if asked.short else tuple(CHANNELS)
    calm_s = 0.3 if asked.short else 2.0
    command = shlex.split(asked.text("sglang", ""))
    shared = shared_folder("bench-weights")
    try:
        with tempfile.TemporaryDirectory() as folder:
            if command:
                where = Path(folder) / "model"
                served = server_rows(command, where, shared, swaps=pairs, short=asked.short)
                return result("weights", served)
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
    """Measure the delta channel over learning rates; also return the versions of the marked one."""
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
                if step and version % FULL_EVERY:  # the others are complete
                    assert publication.moved_bytes is not None
                    shares.append(publication.moved_bytes / publication.num_bytes)
                    publish_s.append(publication.publish_s)
                version += 1
                model.train_step()
            rows.append(_share_row(name, lr, shares, publication.num_bytes))
            echo(f"lr {lr:g}: {mean(shares):.2%} of the bytes, {mean(publish_s):.2f} s to publish")
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
    echo(
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


class WeightSideModel:
    """A causal LM of random weights in float32, trained by AdamW on random tokens.

    Every token of the vocabulary is a possible target, so with a tied head no gradient is 0.

    Args:
        shape: The shape of a Qwen3 model.
        folder: The folder for its initial weights in bfloat16, for the engine.
        num_tokens: Tokens per train step.
    """

    def __init__(self, shape: Mapping[str, Any], folder: str, num_tokens: int) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.manual_seed(0)
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = Qwen3Config(**shape, **none, tie_word_embeddings=True)
        self.model = Qwen3ForCausalLM(config)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self._num_tokens = num_tokens
        half = dict(self.published())
        self.model.config.dtype = torch.bfloat16
        self.model.save_pretrained(folder, state_dict=half)
        self._optimizer: torch.optim.Optimizer | None = None

    def begin(self, lr: float) -> None:
        """Use another learning rate from now on, with a new AdamW."""
        import torch

        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, weight_decay=0.0, foreach=False
        )

    def train_step(self) -> None:
        """Take one AdamW update."""
        import torch

        assert self._optimizer is not None
        vocab = int(self.model.config.vocab_size)
        ids = torch.randint(0, vocab, (1, self._num_tokens))
        self.model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in bfloat16, cast one by one, as the trainer publishes them."""
        import torch

        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(torch.bfloat16)

    def snapshot(self) -> Weights:
        """Return a copy of the current published weights."""
        return dict(self.published())


def make_engine(
    channel: Mapping[str, Any], location: str, folder: str, max_tokens: int
) -> InferenceEngine:
    """Build the engine in its own process."""
    engine: InferenceEngine = build(
        "inference_engines",
        "embedded",
        {"max_sessions": NUM_STREAMS},
        model_path=folder,
        dtype="bfloat16",
        device="cpu",
        channel=open_channel(channel, location),
        kv_on_swap="keep",
        max_context_tokens=max_tokens,
    )
    return engine


def open_channel(channel: Mapping[str, Any], location: str) -> WeightChannel:
    """Open an end of a channel."""
    options = {k: v for k, v in channel.items() if k != "id"}
    end: WeightChannel = build("weight_channels", channel["id"], options, location=location)
    return end


@dataclass(slots=True)
class Measured:
    """The measurements of one channel, over several versions."""

    stall_s: list[float]
    """Stall of each swap during generation, as the engine measures it."""
    stopped_s: list[float]
    """Stop of the peer's generation, for the fetch and the copy of the next version."""
    fetch_s: list[float]
    publish_s: list[float]
    moved_bytes: list[int]
    num_bytes: int = 0
    calm_tokens_per_s: float = 0.0
    busy_tokens_per_s: float = 0.0
    """Token rate while weights are fetched."""


async def measure(
    channel: Mapping[str, Any],
    location: str,
    folder: str,
    versions: list[Weights],
    *,
    calm_s: float = 2.0,
) -> Measured:
    """Publish versions one after the other to an engine that always generates.

    Odd versions are loaded during generation, even ones in the peer's way.

    Args:
        channel: Its id and options.
        location: The common location of both ends.
        folder: The folder of the model.
        versions: The versions to publish, an odd number. The first prepares both ends and is not
            counted.
        calm_s: Seconds to measure the engine before its weights change.
    """
    publisher = open_channel(channel, location)
    part = WorkerProcess("engine", num_threads=1)
    max_tokens = PROMPT_TOKENS + NEW_TOKENS
    arguments = {"channel": channel, "location": location, "folder": folder}
    decoding: asyncio.Task[None] | None = None
    measured = Measured([], [], [], [], [])
    try:
        await part.start(ENGINE, {**arguments, "max_tokens": max_tokens})
        await part.call("start")
        decoding = asyncio.create_task(_decode(part))
        engine = _Watched(part)
        for version, weights in enumerate(versions):
            publication = await asyncio.to_thread(publisher.publish, version, weights.items())
            if version == 0:
                await part.call("load_weights", version)
                measured.calm_tokens_per_s = await engine.rate(calm_s)
                continue
            measured.publish_s.append(publication.publish_s)
            measured.num_bytes = publication.num_bytes
            load = engine.load if version % 2 else engine.load_stopped
            await load(version, measured)
        gc.collect()
    finally:
        if decoding is not None:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)
        await part.close()
        publisher.close()
    return measured


class _Watched:
    """The engine, and its token rate."""

    def __init__(self, part: WorkerProcess) -> None:
        self._part = part
        self._rates: list[float] = []

    async def rate(self, seconds: float) -> float:
        """Return tokens per second during a time."""
        before, began = await self._num_tokens(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (await self._num_tokens() - before) / (time.perf_counter() - began)

    async def load(self, version: int, measured: Measured) -> None:
        """Load a version during generation."""
        before, began = await self._num_tokens(), time.perf_counter()
        swap: WeightSwap = await self._part.call("load_weights", version)
        took = time.perf_counter() - began
        self._rates.append((await self._num_tokens() - before) / took)
        measured.busy_tokens_per_s = median(self._rates)
        measured.stall_s.append(swap.stall_s)
        measured.fetch_s.append(swap.fetch_s)
        measured.moved_bytes.append(swap.moved_bytes)

    async def load_stopped(self, version: int, measured: Measured) -> None:
        """Load a version while generation is paused."""
        await self._part.call("pause")
        began = time.perf_counter()
        await self._part.call("load_weights", version)
        measured.stopped_s.append(time.perf_counter() - began)
        await self._part.call("resume")

    async def _num_tokens(self) -> int:
        return int((await self._part.call("stats")).decode_tokens)


async def _decode(part: WorkerProcess) -> None:
    """Generate answers endlessly, one after the other in each stream."""

    async def stream(number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(1_000_000):
            ids = rng.integers(0, 256, PROMPT_TOKENS).tolist()
            request = GenerateRequest(f"{number}.{turn}", ids, NEW_TOKENS, sampling_key=turn)
            await part.call("generate", request)

    await asyncio.gather(*(stream(n) for n in range(NUM_STREAMS)))


SERVER_CHANNELS: Mapping[str, Mapping[str, Any]] = {
    "in requests (delta over shared-memory)": {"id": "delta", "full_every": 1},
    "files (shared-memory)": {"id": "shared-memory"},
    "broadcast (collective)": {"id": "collective"},
}
IN_REQUESTS = "in requests"
SERVED: Mapping[str, int] = {"num_layers": 14, "width": 768, "num_heads": 12, "num_kv_heads": 4}
SERVED_SHORT: Mapping[str, int] = {"num_layers": 2, "width": 64, "num_heads": 2, "num_kv_heads": 1}
SERVER = f"{__name__}:make_server"


@dataclass(slots=True)
class ServerSwaps:
    """The measurements of one channel."""

    num_bytes: int = 0
    stall_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    """Growth of the peak memory of the engine's process during a swap."""


def server_rows(
    command: Sequence[str], folder: Path, shared: Path, *, swaps: int, short: bool
) -> Iterator[dict[str, object]]:
    """Measure each channel.

    Args:
        command: What launches a server, without its flags.
        folder: An empty folder for the model.
        shared: A folder in shared memory for the channels.
        swaps: The number of swaps to measure on each channel.
        short: A tiny model, and the broadcast only.
    """
    name = _served_model(folder, SERVED_SHORT if short else SERVED)
    peer: ServerSwaps | None = None
    for case, channel in list(SERVER_CHANNELS.items())[-1 if short else 0 :]:
        got = asyncio.run(_swap_served(command, folder, channel, str(shared / "server"), swaps))
        stall_ms, host_mb = median(got.stall_s) * 1e3, median(got.host_bytes) / 1e6
        echo(f"SGLang, {case}: stall {stall_ms:.0f} ms, {host_mb:.1f} MB in the engine's process")
        their_stall = median(peer.stall_s) * 1e3 if peer else None
        their_mb = median(peer.host_bytes) / 1e6 if peer else None
        label = f"{name}, SGLang, {case}, {got.num_bytes / 1e6:.1f} MB"
        who = IN_REQUESTS if peer else None
        yield row(f"{label}: stall per swap", stall_ms, their_stall, who, "ms")
        yield row(f"{label}: memory of the engine's process", host_mb, their_mb, who, "MB")
        yield row(f"{label}: publish", median(got.publish_s), None, None, "s")
        peer = peer or got


def _served_model(folder: Path, shape: Mapping[str, int]) -> str:
    from rollart_core.config.model import NewModel
    from rollart_core.models.new import new_model

    text = "search [red shoes] click [buy now] item 1, price under 40 dollars. " * 40
    size: Any = NewModel(kind="new", **shape, ffn_width=8 * shape["width"] // 3)
    new_model(str(folder), size, [text], 0)
    num = sum(tensor.numel() for tensor in _weights_of(folder).values())
    return f"{num / 1e6:.0f}M"


def _weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def make_server(
    channel: Mapping[str, Any], location: str, folder: str, command: Sequence[str]
) -> InferenceEngine:
    """Build the engine in its own process."""
    engine: InferenceEngine = build(
        "inference_engines",
        "sglang",
        {"command": tuple(command), "server_args": {"max_total_tokens": 4096}},
        model_path=folder,
        dtype="float32",
        device="cpu",
        channel=open_channel(channel, location),
        max_context_tokens=512,
    )
    return engine


async def _swap_served(
    command: Sequence[str], folder: Path, channel: Mapping[str, Any], location: str, swaps: int
) -> ServerSwaps:
    publisher, part = open_channel(channel, location), WorkerProcess("engine", num_threads=1)
    arguments = {"channel": channel, "location": location, "folder": str(folder)}
    found, base = ServerSwaps(), _weights_of(folder)
    try:
        await part.start(SERVER, {**arguments, "command": list(command)})
        await part.call("start")
        for version in range(swaps + 1):
            weights = {name: tensor * (1 + version / 64) for name, tensor in base.items()}
            published = await asyncio.to_thread(publisher.publish, version, weights.items())
            before = _peak_memory(part.pid, reset=True)
            swap: WeightSwap = await part.call("load_weights", version)
            if version:
                found.num_bytes = swap.num_bytes
                found.stall_s.append(swap.stall_s)
                found.publish_s.append(published.publish_s)
                found.host_bytes.append(_peak_memory(part.pid) - before)
    finally:
        await part.close()
        publisher.close()
    return found


def _peak_memory(pid: int | None, *, reset: bool = False) -> int:
    """Return the peak resident memory of a process in bytes; first reset it to the current one."""
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
