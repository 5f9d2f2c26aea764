"""A LoRA trainer whose adapters come to a real inference server during turns."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollart_core.config.training import AuxiliaryModels, LoRA
from rollart_core.contracts.inference import GenerateResult
from rollart_core.contracts.weights import WeightChannel
from rollart_plugins.engines.server_engine import ServerEngine
from rollart_plugins.weights.shared_memory import SharedMemoryChannel
from support.engine_servers import EXACT, Traffic, begun, request

if TYPE_CHECKING:
    from rollart_core.training.trainer import Trainer

ADAPTERS = LoRA(rank=3, alpha=7.0, sync="adapter")
NUM_UPDATES = 3
TEMPERATURE = 0.8


class Open(Protocol):
    def __call__(
        self, *, channel: WeightChannel, lora: LoRA
    ) -> AbstractAsyncContextManager[ServerEngine]:
        """Return a started engine."""


def train_under(open_engine: Open, model: str, folder: Path) -> None:
    """Train adapters during turns, and compare all logprobs with those of the trainer.

    Args:
        open_engine: What starts the engine.
        model: The base model.
        folder: Folder of the weight channel.
    """
    from support.small_models import make_groups, make_trainer

    ours, theirs = SharedMemoryChannel(str(folder), keep=10), SharedMemoryChannel(str(folder))
    beside = AuxiliaryModels(lora=ADAPTERS)
    trainer = make_trainer(model, channel=ours, beside=beside, lr=0.05)
    published: list[Any] = []

    def publish(version: int) -> int:
        trainer.publish(version)
        published.append(trainer._weights.now())
        return sum(tensor.nbytes for tensor in published[-1].values())

    def update(version: int) -> int:
        trainer.train_batch(make_groups(seed=version), version - 1)
        return publish(version)

    async def main() -> dict[int, GenerateResult]:
        async with open_engine(channel=theirs, lora=ADAPTERS) as engine:
            num_bytes = publish(0)
            assert (await engine.load_weights(0)).num_bytes == num_bytes
            traffic = Traffic(engine)
            for version in range(1, NUM_UPDATES + 1):
                await traffic.turn_from_now_on()
                num_bytes = await asyncio.to_thread(update, version)
                swap = await engine.load_weights(version)
                assert swap.policy_version == version
                assert swap.num_bytes == num_bytes  # the adapter, and nothing else
                assert num_bytes <= swap.moved_bytes < 1.5 * num_bytes
                assert swap.num_recomputed_tokens == 0
            await traffic.turn_from_now_on()
            results = await traffic.end()
            await _only_the_newest_is_kept(engine, NUM_UPDATES)
            return results

    try:
        results = asyncio.run(main())
    finally:
        ours.close()
    assert {result.spans[0].policy_version for result in results.values()} == {0, 1, 2, 3}
    for number, result in results.items():
        (span,) = result.spans
        assert (span.start, span.stop, span.kv) == (0, len(result.token_ids), "fresh")
        with trainer._weights.holding(published[span.policy_version]):
            wanted = _logprobs(trainer, [*request(number).token_ids, *result.token_ids])
        given = np.array(result.inference_logprobs)
        assert np.abs(wanted[-len(given) :] - given).max() < EXACT


async def _only_the_newest_is_kept(engine: ServerEngine, newest: int) -> None:
    """A turn keeps its adapter through a load, and the next load unloads what no turn uses."""
    turns = await begun(engine, 5_000, 2)
    await engine.load_weights(newest)  # another adapter of the same version
    assert not all(turn.done() for turn in turns)
    assert {span.policy_version for turn in turns for span in (await turn).spans} == {newest}
    await engine.load_weights(newest)
    models = (await engine._client.get("/v1/models"))["data"]
    (name,) = [row["id"] for row in models if row["id"].startswith("rollart-")]
    assert name == f"rollart-{engine._adapter}"
    await engine.pause()  # the colocated trainer does so, and loads before it goes on
    await engine.load_weights(newest)
    await engine.resume()
    (span,) = (await engine.generate(request(6_000, 4))).spans
    assert span.policy_version == newest


def _logprobs(trainer: Trainer, row: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits = trainer._model(torch.tensor([row])).logits[0]
    logprobs = torch.log_softmax(logits.float() / TEMPERATURE, -1)
    return logprobs[torch.arange(len(row) - 1), torch.tensor(row[1:])].numpy()
