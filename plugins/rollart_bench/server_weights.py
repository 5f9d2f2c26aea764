"""New weights in a real SGLang server: the stall, and the memory of the engine's process.

The server is launched for each weight channel, because the channel decides how weights reach it:

    collective                 the server receives the trainer's broadcast
    shared-memory              the server loads the channel's files
    delta over shared-memory   the engine's process sends pickled tensors in requests: the peer

Takes: the command of a server, a folder. Gives: rows. Never: counts the first swap, in which the
server joins the process group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rollart_bench.rows import echo, row
from rollart_core.contracts.inference import InferenceEngine, WeightSwap
from rollart_core.contracts.weights import WeightChannel
from rollart_core.plugins.registry import build
from rollart_core.runtime.process import WorkerProcess

if TYPE_CHECKING:
    import torch

CHANNELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "in requests (delta over shared-memory)": {"id": "delta", "full_every": 1},
    "files (shared-memory)": {"id": "shared-memory"},
    "broadcast (collective)": {"id": "collective"},
}
PEER = "in requests"
SHAPE: Final = {"num_layers": 14, "width": 768, "num_heads": 12, "num_kv_heads": 4}
SHORT_SHAPE: Final = {"num_layers": 2, "width": 64, "num_heads": 2, "num_kv_heads": 1}
MAX_TOKENS = 512
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
    name = _new_model(folder, SHORT_SHAPE if short else SHAPE)
    peer: ServerSwaps | None = None
    for case, channel in list(CHANNELS.items())[-1 if short else 0 :]:
        got = asyncio.run(_measure(command, folder, channel, str(shared / "server"), swaps))
        stall_ms, host_mb = median(got.stall_s) * 1e3, median(got.host_bytes) / 1e6
        echo(f"SGLang, {case}: stall {stall_ms:.0f} ms, {host_mb:.1f} MB in the engine's process")
        their_stall = median(peer.stall_s) * 1e3 if peer else None
        their_mb = median(peer.host_bytes) / 1e6 if peer else None
        label = f"{name}, SGLang, {case}, {got.num_bytes / 1e6:.1f} MB"
        who = PEER if peer else None
        yield row(f"{label}: stall per swap", stall_ms, their_stall, who, "ms")
        yield row(f"{label}: memory of the engine's process", host_mb, their_mb, who, "MB")
        yield row(f"{label}: publish", median(got.publish_s), None, None, "s")
        peer = peer or got


def _new_model(folder: Path, shape: Mapping[str, int]) -> str:
    from rollart_core.config.model import NewModel
    from rollart_core.models.new import new_model

    text = "search [red shoes] click [buy now] item 1, price under 40 dollars. " * 40
    size: Any = NewModel(kind="new", **shape, ffn_width=8 * shape["width"] // 3)
    new_model(str(folder), size, [text], 0)
    num = sum(tensor.numel() for tensor in _weights(folder).values())
    return f"{num / 1e6:.0f}M"


def _weights(folder: Path) -> dict[str, torch.Tensor]:
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
        channel=_open(channel, location),
        max_context_tokens=MAX_TOKENS,
    )
    return engine


def _open(channel: Mapping[str, Any], location: str) -> WeightChannel:
    options = {key: value for key, value in channel.items() if key != "id"}
    end: WeightChannel = build("weight_channels", channel["id"], options, location=location)
    return end


async def _measure(
    command: Sequence[str], folder: Path, channel: Mapping[str, Any], location: str, swaps: int
) -> ServerSwaps:
    publisher, part = _open(channel, location), WorkerProcess("engine", num_threads=1)
    arguments = {"channel": channel, "location": location, "folder": str(folder)}
    found, base = ServerSwaps(), _weights(folder)
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
