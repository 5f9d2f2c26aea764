"""Both ends of ``rollart bench weights``: weights that are trained, and an engine that decodes.

Takes: a model's shape, learning rates; a channel. Gives: published versions, measured swaps. Never:
draws conclusions.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from rollart_core.contracts.inference import GenerateRequest, InferenceEngine, WeightSwap
from rollart_core.contracts.weights import WeightChannel
from rollart_core.plugins.registry import build
from rollart_core.runtime.process import WorkerProcess

if TYPE_CHECKING:
    import torch

ENGINE = f"{__name__}:make_engine"
NUM_STREAMS = 4
"""Answers that are generated at once while weights change."""
PROMPT_TOKENS, NEW_TOKENS = 16, 64

Weights = dict[str, "torch.Tensor"]


class WeightSideModel:
    """A causal LM of random weights in float32, trained by AdamW on random tokens.

    Every token of the vocabulary is a target's rival, so that with a tied head no gradient is 0.

    Args:
        shape: Of a Qwen3 model.
        folder: Where its first weights are saved in bfloat16, for the engine.
        num_tokens: Of one train step.
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
        """Train at another learning rate from now on, with a fresh AdamW."""
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
        """Return a copy of what is published now."""
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
    """Open an end."""
    options = {k: v for k, v in channel.items() if k != "id"}
    end: WeightChannel = build("weight_channels", channel["id"], options, location=location)
    return end


@dataclass(slots=True)
class Measured:
    """One channel, over several versions."""

    stall_s: list[float]
    """Of each swap while tokens are generated, as the engine measures it."""
    stopped_s: list[float]
    """The peer's: generation is stopped, the next version fetched and copied, and goes on."""
    fetch_s: list[float]
    publish_s: list[float]
    moved_bytes: list[int]
    num_bytes: int = 0
    calm_tokens_per_s: float = 0.0
    busy_tokens_per_s: float = 0.0
    """While weights were fetched."""


async def measure(
    channel: Mapping[str, Any],
    location: str,
    folder: str,
    versions: list[Weights],
    *,
    calm_s: float = 2.0,
) -> Measured:
    """Publish versions one after the other to an engine that generates all the time.

    Odd ones are loaded meanwhile, even ones the peer's way.

    Args:
        channel: Its id and options.
        location: Where both ends meet.
        folder: Of the model.
        versions: What to publish, an odd number; the first prepares both ends and is not counted.
        calm_s: How long the engine is watched before its weights change.
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
    """The engine, and how fast it generates."""

    def __init__(self, part: WorkerProcess) -> None:
        self._part = part
        self._rates: list[float] = []

    async def rate(self, seconds: float) -> float:
        """Return tokens per second over some time."""
        before, began = await self._num_tokens(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (await self._num_tokens() - before) / (time.perf_counter() - began)

    async def load(self, version: int, measured: Measured) -> None:
        """Load a version while it generates."""
        before, began = await self._num_tokens(), time.perf_counter()
        swap: WeightSwap = await self._part.call("load_weights", version)
        took = time.perf_counter() - began
        self._rates.append((await self._num_tokens() - before) / took)
        measured.busy_tokens_per_s = median(self._rates)
        measured.stall_s.append(swap.stall_s)
        measured.fetch_s.append(swap.fetch_s)
        measured.moved_bytes.append(swap.moved_bytes)

    async def load_stopped(self, version: int, measured: Measured) -> None:
        """Load a version while it generates nothing."""
        await self._part.call("pause")
        began = time.perf_counter()
        await self._part.call("load_weights", version)
        measured.stopped_s.append(time.perf_counter() - began)
        await self._part.call("resume")

    async def _num_tokens(self) -> int:
        return int((await self._part.call("stats")).decode_tokens)


async def _decode(part: WorkerProcess) -> None:
    """Generate answers, one after the other in each stream, for ever."""

    async def stream(number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(1_000_000):
            ids = rng.integers(0, 256, PROMPT_TOKENS).tolist()
            request = GenerateRequest(f"{number}.{turn}", ids, NEW_TOKENS, sampling_key=turn)
            await part.call("generate", request)

    await asyncio.gather(*(stream(n) for n in range(NUM_STREAMS)))
