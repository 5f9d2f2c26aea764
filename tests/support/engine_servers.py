"""What tests on real inference servers share: a small model, versions of its weights, traffic."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollart_core.contracts.inference import GenerateRequest, GenerateResult, InferenceEngine
from rollart_core.errors import EngineDied
from rollart_plugins.weights.collective import CollectiveChannel
from rollart_plugins.weights.in_server.rollart_group import BroadcastGroup
from rollart_plugins.weights.shared_memory import SharedMemoryChannel
from support.pace import scaled

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 512
EXACT = 1e-4


def make_model(folder: Path, seed: int = 0) -> str:
    """A small Qwen3 and a tokenizer of little text."""
    from rollart_core.config.model import NewModel
    from rollart_core.models.new import new_model

    texts = [
        "search [red shoes] click [buy now] item 1, price under 40 dollars. naïve café 日本 🙂 "
        * 20,
        f"Turn {seed}: you see a page of results. What now? " * (20 + seed),
    ]
    new_model(str(folder), NewModel(num_layers=2, width=64, kind="new"), texts, seed)
    return str(folder)


class Versions:
    """Weights of several policy versions, and what they say of tokens."""

    def __init__(self, model_path: str, num: int, *, same_kv: bool) -> None:
        """``same_kv``: they differ only in what comes after the last layer's keys and values."""
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        base = load_file(Path(model_path) / "model.safetensors")
        self.weights: list[dict[str, torch.Tensor]] = []
        for v in range(num):
            if same_kv:
                now = {k: t * (1 + v) if k == "model.norm.weight" else t for k, t in base.items()}
            else:
                now = {k: t + torch.randn_like(t) * 0.05 * v for k, t in base.items()}
            self.weights.append(now)

    def off(self, prompt: list[int], result: GenerateResult, temperature: float) -> float:
        """The largest difference between the logprobs and those of each span's own version."""
        worst = 0.0
        for span in result.spans:
            row = [*prompt, *result.token_ids[: span.stop]]
            wanted = self._logprobs(span.policy_version, row, temperature)
            given = result.inference_logprobs[span.start : span.stop]
            worst = max(worst, float(np.abs(wanted[-len(given) :] - given).max()))
        return worst

    def _logprobs(self, version: int, row: list[int], temperature: float) -> np.ndarray:
        import torch

        with torch.no_grad():
            output = torch.func.functional_call(
                self._model, self.weights[version], (torch.tensor([row]),), tie_weights=True
            )
            logprobs = torch.log_softmax(output.logits[0] / temperature, -1)
        return logprobs[torch.arange(len(row) - 1), torch.tensor(row[1:])].numpy()


class Traffic:
    """Turns on an engine, each followed by another when it ends: some are always under way.

    Args:
        engine: Which.
        num_long: Turns at once that take long.
        long_tokens: Most tokens of those.

    Attributes:
        results: Of the turns that have ended, by the number of :func:`request`.
    """

    def __init__(self, engine: InferenceEngine, num_long: int = 7, long_tokens: int = 150) -> None:
        self.results: dict[int, GenerateResult] = {}
        self._engine = engine
        self._numbers = itertools.count()
        self._is_over = False
        lengths = [long_tokens] * num_long + [10]
        self._tasks = [asyncio.create_task(self._ask_on(length)) for length in lengths]

    async def turn_from_now_on(self) -> None:
        """Wait until a turn has ended that begins after this call."""
        first = next(self._numbers)
        while not any(number > first for number in self.results):
            await asyncio.sleep(0.005)
            for task in self._tasks:
                if task.done():
                    task.result()

    async def end(self) -> dict[int, GenerateResult]:
        """Let the turns come to their ends, and return the results of all."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.results

    async def _ask_on(self, num_tokens: int) -> None:
        while not self._is_over:
            number = next(self._numbers)
            self.results[number] = await self._engine.generate(request(number, num_tokens))


def request(i: int, num_tokens: int = 60, temperature: float = 0.8, **more) -> GenerateRequest:
    """The turn ``i``."""
    prompt = [5 + i % 250, 6, 7, 8, 9 + i // 250] * 4
    name = f"t{i}#0"
    return GenerateRequest(
        f"{name}/0", prompt, num_tokens, session_id=name, temperature=temperature, **more
    )


@asynccontextmanager
async def channel_of(
    folder: Path, versions: Versions, kind: Callable[..., Any] = SharedMemoryChannel, **options: Any
):
    """The engine's end of a channel that holds all these versions."""
    ours = kind(str(folder), keep=10, **options)
    theirs = kind(str(folder), **options)
    for v, weights in enumerate(versions.weights):
        ours.publish(v, weights.items())
    try:
        yield theirs
    finally:
        ours.close()


async def swapped_under(engine: InferenceEngine, versions: list[int]) -> dict[int, GenerateResult]:
    """Turns during which one version after another comes; each also has turns of its own."""
    await engine.load_weights(versions[0])
    traffic = Traffic(engine)
    for version in versions[1:]:
        await traffic.turn_from_now_on()
        await engine.load_weights(version)
    await traffic.turn_from_now_on()
    return await traffic.end()


def check_spans(
    results: dict[int, GenerateResult], versions: Versions, expected: list[int], kv: str
) -> None:
    crossed = 0
    met = set()
    for i, result in results.items():
        bounds = [0, *(span.stop for span in result.spans)]
        assert [span.start for span in result.spans] == bounds[:-1]
        assert bounds[-1] == len(result.token_ids)
        came = [span.policy_version for span in result.spans]
        assert came == [version for version in expected if version in came]
        first, *later = [span.kv for span in result.spans]
        # One that was sent before a swap may have been read before it.
        assert first in ("fresh", kv if len(came) == 1 and kv == "kept" else "fresh")
        assert set(later) <= {kv}
        assert versions.off(list(request(i).token_ids), result, 0.8) < EXACT
        crossed += len(came) > 1
        met |= set(came)
    assert crossed > 1
    assert met == set(expected)


async def begun(engine: InferenceEngine, first: int, num: int) -> list[asyncio.Task]:
    """Send long turns, and wait until the server generates; any of them may end by itself."""
    turns = [
        asyncio.create_task(engine.generate(request(i, 400))) for i in range(first, first + num)
    ]
    while not (await engine.stats()).num_running and not all(turn.done() for turn in turns):
        await asyncio.sleep(0.005)
    return turns


def recorded(monkeypatch: pytest.MonkeyPatch, engine: InferenceEngine) -> list[tuple[str, object]]:
    """Return a list of what the server is asked from now on."""
    asked: list[tuple[str, object]] = []
    post = engine._client.post

    async def recording(path: str, body: object = None, **settings: object) -> object:
        asked.append((path, body))
        return await post(path, body, **settings)

    monkeypatch.setattr(engine._client, "post", recording)
    return asked


async def broadcast_with_a_death(
    make: Callable[..., Any], launched: dict[str, Any], model: str, folder: Path
) -> tuple[int, int]:
    """Broadcast to two servers; in the third version's third bucket, one of them dies.

    Args:
        make: The class of the engine.
        launched: Options with which it launches its server.
        model: Folder of the model.
        folder: Folder of the weight channel.

    Returns:
        How many bytes the other engine's process received then, and the size of the weights.
    """
    versions = Versions(model, 4, same_kv=False)
    options = {"bucket_bytes": 200_000, "gather_s": scaled(60)}
    writer = CollectiveChannel(str(folder), keep=10, **options)
    ends = [CollectiveChannel(str(folder), **options) for _ in range(2)]
    settings = {"model_path": model, "device": "cpu", "max_context_tokens": MAX_TOKENS}
    engines = [
        make(channel=end, engine_index=i, **settings, **launched) for i, end in enumerate(ends)
    ]
    first, second = engines

    async def check_version(engine: Any, version: int) -> None:
        turn = await engine.generate(request(0))
        assert [span.policy_version for span in turn.spans] == [version]
        assert versions.off(list(request(0).token_ids), turn, 0.8) < EXACT

    broadcast, blocks = BroadcastGroup.broadcast, itertools.count(1)

    def kills_in_the_third(group: BroadcastGroup, block: torch.Tensor) -> None:
        if next(blocks) == 3:
            os.killpg(second._process.pid, signal.SIGKILL)
        broadcast(group, block)

    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        for v in (1, 2):
            writer.publish(v, versions.weights[v].items())
            assert [end.newest() for end in ends] == [v, v]  # both are connected
            await asyncio.gather(*(engine.load_weights(v) for engine in engines))
            for engine in engines:
                await check_version(engine, v)
        assert [end.moved_bytes for end in ends] == [0, 0]
        assert writer._hub is not None
        assert writer._hub._group is not None
        members, _ = writer._hub._group
        assert len(members) == 2, "both servers are in one group"

        writer.publish(3, versions.weights[3].items())
        assert [end.newest() for end in ends] == [3, 3]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BroadcastGroup, "broadcast", kills_in_the_third)
            swap, lost = await asyncio.gather(
                *(engine.load_weights(3) for engine in engines), return_exceptions=True
            )
        assert next(blocks) > 3
        assert isinstance(lost, EngineDied)
        assert swap.policy_version == 3
        await check_version(first, 3)
        return ends[0].moved_bytes, swap.num_bytes
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
        writer.close()
