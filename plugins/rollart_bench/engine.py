"""`rollart bench engine`: the embedded engine compared with transformers' ``generate``.

Random Qwen3 models: 0.85M parameters in float32, 90M in bfloat16. The loads are one turn of 16
tokens in and 64 out at several concurrencies, and conversations that grow over five turns. The
peer gets the whole text each turn, as users of ``generate`` do. Both sample at temperature 1; ours
also returns logprobs. The sides alternate, and each pair gives a ratio.

Takes: ``pairs``, ``threads``, ``short`` (small model, one pair, fewer loads). Gives: rows in
generated tokens per second. Never: counts loading.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_core.contracts.inference import GenerateRequest, GenerateResult, InferenceEngine
from rollart_core.plugins.registry import build

if TYPE_CHECKING:
    import torch

TAKES: Final = ("pairs", "threads", "short")

PEER = "transformers generate"
ENGINE = "embedded"
SMALL: Mapping[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 496,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
LARGE: Mapping[str, Any] = {
    "vocab_size": 18432,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The concurrent requests of one measurement."""

    conversations: int
    turns: int = 1
    new_prompt_tokens: int = 16
    """New prompt tokens per turn."""
    new_tokens: int = 64
    """Tokens generated per turn."""

    @property
    def num_generated(self) -> int:
        """Tokens generated over all conversations and turns."""
        return self.conversations * self.turns * self.new_tokens

    @property
    def max_tokens(self) -> int:
        """The length of a conversation at its end."""
        return self.turns * (self.new_prompt_tokens + self.new_tokens)

    def prompt(self, conversation: int, turn: int, vocab_size: int) -> list[int]:
        """The number of tokens that a turn adds."""
        rng = np.random.default_rng([conversation, turn])
        drawn: list[int] = rng.integers(0, vocab_size, self.new_prompt_tokens).tolist()
        return drawn


SINGLE_TURNS = (EngineLoad(1), EngineLoad(8), EngineLoad(32))
SHORT = (EngineLoad(1, new_tokens=16), EngineLoad(8, new_tokens=16))
SHORT_GROWING = EngineLoad(8, turns=2, new_prompt_tokens=60, new_tokens=8)
GROWING = EngineLoad(32, turns=5, new_prompt_tokens=60, new_tokens=16)
LEARNING = EngineLoad(128, turns=5, new_prompt_tokens=60, new_tokens=7)


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short``: the small model only, one pair, three small loads, one thread (two wait
            for each other on a busy machine); ``pairs``: the number of pairs (3); ``threads``: of
            torch, on both sides (all cores).

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("engine", options)
    require("torch", "transformers", extra="train")
    pairs = asked.integer("pairs", 1 if asked.short else 3)
    threads = asked.integer("threads", 1 if asked.short else len(os.sched_getaffinity(0)))
    rows = _small_rows(pairs, threads, short=asked.short)
    if not asked.short:
        rows += _large_rows(pairs, threads)
    return result("engine", rows, conditions={"threads": threads})


def _small_rows(pairs: int, threads: int, *, short: bool) -> list[dict[str, object]]:
    with _threads(threads), tempfile.TemporaryDirectory() as folder:
        model = _save_model(SMALL, "float32", folder)
        duel = Duel(model, folder, "float32", "0.85M fp32", pairs)
        rows = [duel.row(load, mark=1.0) for load in (SHORT if short else SINGLE_TURNS)]
        rows.append(duel.row(SHORT_GROWING if short else GROWING, mark=2.0))
        if not short:
            with _threads(1):
                learning = replace(duel, name="0.85M fp32, one thread")
                rows.append(learning.row(LEARNING, mark=2.0))
        return rows + duel.agreement()


def _large_rows(pairs: int, threads: int) -> list[dict[str, object]]:
    import torch

    with _threads(threads), tempfile.TemporaryDirectory() as folder:
        model = _save_model(LARGE, "bfloat16", folder)
        duel = Duel(model, folder, "bfloat16", "90M bf16", pairs)
        rows = [duel.row(load, mark=1.0) for load in SINGLE_TURNS]
        rows.append(replace(duel, pairs=1).row(replace(GROWING, conversations=4), mark=2.0))
        wide = replace(duel, model=model.to(torch.float32), peer=f"{PEER}, in float32")
        return [*rows, wide.row(EngineLoad(32), mark=1.0)]


@dataclass(frozen=True, slots=True)
class Duel:
    """One model, run by both sides."""

    model: Any
    """The peer's model."""
    folder: str
    """The folder that our engine loads."""
    dtype: str
    name: str
    pairs: int
    peer: str = PEER

    def row(self, load: EngineLoad, *, mark: float) -> dict[str, object]:
        """Measure one load and return its row."""

        async def measure(engine: InferenceEngine) -> list[tuple[float, float]]:
            small = replace(load, new_tokens=2, turns=1)
            await _converse_all(engine, small, "warm", self._vocab)
            _converse_peer(self.model, small)
            return [
                (await self._ours(engine, load, str(i)), self._theirs(load))
                for i in range(self.pairs)
            ]

        got = self._with_engine(measure, load)
        case = f"{self.name}, {load.conversations} at once, {load.new_prompt_tokens} tokens in, "
        case += f"{load.new_tokens} out" + (f", {load.turns} turns" if load.turns > 1 else "")
        ours, theirs = (median(column) for column in zip(*got, strict=True))
        echo(f"{case}: {ours:.0f} tokens/s, {self.peer} {theirs:.0f}")
        ratios = [a / b for a, b in got]
        return row(case, ours, theirs, self.peer, "tokens/s", ratios=ratios, mark=mark)

    @property
    def _vocab(self) -> int:
        return int(self.model.config.vocab_size)

    async def _ours(self, engine: InferenceEngine, load: EngineLoad, name: str) -> float:
        gc.collect()
        began = time.perf_counter()
        await _converse_all(engine, load, name, self._vocab)
        return load.num_generated / (time.perf_counter() - began)

    def _theirs(self, load: EngineLoad) -> float:
        gc.collect()
        began = time.perf_counter()
        _converse_peer(self.model, load)
        return load.num_generated / (time.perf_counter() - began)

    def _with_engine(
        self, work: Callable[[InferenceEngine], Coroutine[Any, Any, Any]], load: EngineLoad
    ) -> Any:
        async def inside() -> Any:
            engine = _make_engine(self.folder, self.dtype, load)
            await engine.start()
            try:
                return await work(engine)
            finally:
                await engine.close()

        return asyncio.run(inside())

    def agreement(self, num_prompts: int = 16) -> list[dict[str, object]]:
        """Return rows that compare greedy tokens and logprobs with the peer's."""
        load = EngineLoad(num_prompts)
        prompts = [load.prompt(i, 0, self._vocab) for i in range(num_prompts)]

        async def greedy(engine: InferenceEngine) -> list[GenerateResult]:
            asked = [
                GenerateRequest(str(i), ids, load.new_tokens, temperature=0.0)
                for i, ids in enumerate(prompts)
            ]
            return list(await asyncio.gather(*map(engine.generate, asked)))

        results: list[GenerateResult] = self._with_engine(greedy, load)
        tokens, logprobs = _greedy_peer(self.model, prompts, load.new_tokens)
        equal = sum(r.token_ids == t for r, t in zip(results, tokens, strict=True))
        ours = np.array([r.inference_logprobs for r in results])
        far = float(np.abs(ours - logprobs).max())
        return [
            row(
                f"{self.name}, greedy answers equal to the peer's",
                equal,
                num_prompts,
                self.peer,
                "answers",
                mark="all",
                meets_mark=equal == num_prompts,
                required=True,
            ),
            row(
                f"{self.name}, largest difference of logprobs from the peer's",
                far,
                None,
                None,
                "nats",
                mark="<= 1e-4",
                meets_mark=far <= 1e-4,
                required=True,
            ),
        ]


async def _converse_all(engine: InferenceEngine, load: EngineLoad, name: str, vocab: int) -> None:
    await asyncio.gather(
        *(_converse(engine, load, f"{name}-{i}", i, vocab) for i in range(load.conversations))
    )


async def _converse(
    engine: InferenceEngine, load: EngineLoad, name: str, index: int, vocab: int
) -> list[int]:
    """Run one conversation and return its tokens."""
    ids: list[int] = []
    for turn in range(load.turns):
        ids += load.prompt(index, turn, vocab)
        request = GenerateRequest(
            f"{name}.{turn}", ids, load.new_tokens, session_id=name, sampling_key=index << 8 | turn
        )
        ids += (await engine.generate(request)).token_ids
    await engine.release(name)
    return ids


def _converse_peer(model: Any, load: EngineLoad) -> torch.Tensor:
    """Run all conversations concurrently. Rows have the same length, so there is no padding."""
    import torch

    ids = torch.empty(load.conversations, 0, dtype=torch.int64)
    vocab = int(model.config.vocab_size)
    for turn in range(load.turns):
        new = torch.tensor([load.prompt(i, turn, vocab) for i in range(load.conversations)])
        ids = torch.cat((ids, new), dim=1)
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=load.new_tokens,
            min_new_tokens=load.new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
        )
    return ids


def _greedy_peer(
    model: Any, prompts: list[list[int]], new_tokens: int
) -> tuple[list[list[int]], np.ndarray[Any, np.dtype[np.float32]]]:
    import torch

    ids = torch.tensor(prompts)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = result.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(result.logits, dim=1).float().log_softmax(-1)
    return new.tolist(), logprobs.gather(-1, new[..., None]).squeeze(-1).numpy()


def _make_engine(folder: str, dtype: str, load: EngineLoad) -> InferenceEngine:
    made: InferenceEngine = build(
        "inference_engines",
        ENGINE,
        {"max_sessions": load.conversations},
        model_path=folder,
        dtype=dtype,
        device="cpu",
        max_context_tokens=load.max_tokens,
    )
    return made


def _save_model(shape: Mapping[str, Any], dtype: str, folder: str) -> Any:
    """Make a random model and return the peer's copy."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = Qwen3Config(
        **shape, **none, tie_word_embeddings=True, initializer_range=0.1, dtype=dtype
    )
    model = Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    return model


@contextmanager
def _threads(num: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
