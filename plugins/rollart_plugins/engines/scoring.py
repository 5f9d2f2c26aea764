"""How likely a model finds the tokens of a row: prefill, with the logits of every row.

Takes: a row and the places asked about. Gives: a logprob for each. Never: samples, or holds more
logits at once than those of one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import torch

from rollart_core.contracts.inference import ScoreRequest
from rollart_core.errors import InferenceFailure
from rollart_cpu.inference.runner import Runner, TokenBatch
from rollart_plugins.engines.requests import refusal

PIECE_TOKENS = 128
"""Rows computed at once: their logits take ``128 x vocabulary`` floats."""


def check_score(request: ScoreRequest, *, vocab_size: int, max_tokens: int) -> None:
    """Refuse what can never be answered.

    Raises:
        InferenceFailure: Saying why; it is not worth a retry.
    """
    tokens, places = np.asarray(request.token_ids), np.asarray(request.positions)
    if not len(tokens) or len(tokens) > max_tokens + 1:
        raise refusal(f"a row of {len(tokens)} tokens does not fit a context of {max_tokens}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise refusal(f"token id {bad} is not in the vocabulary of {vocab_size}")
    if len(places) and not (
        places[0] >= 1 and places[-1] < len(tokens) and (np.diff(places) > 0).all()
    ):
        raise refusal(f"positions must ascend from 1 to {len(tokens) - 1}")
    if not 0 < request.temperature < float("inf"):
        raise refusal(f"temperature is {request.temperature}, more than 0 is needed")


async def score_row(ready: Callable[[], Runner], slot: int, request: ScoreRequest) -> list[float]:
    """Return the logprob of each token asked about.

    Args:
        ready: The runner, or an error once it is gone.
        slot: A row of the cache that nobody else uses.
        request: What to score.

    Raises:
        InferenceFailure: When the engine is closed meanwhile, or the logits are not finite.
    """
    tokens = np.asarray(request.token_ids, dtype=np.int64)
    places = np.asarray(request.positions, dtype=np.int64)
    found: list[float] = []
    end = int(places[-1]) if len(places) else 0  # the last token asked about is not read itself
    size = min(PIECE_TOKENS, ready().max_batch_tokens)
    for start in range(0, end, size):
        runner, stop = ready(), min(start + size, end)
        asked = places[(places > start) & (places <= stop)]
        batch = _piece(tokens[start:stop], slot, start, every_row=bool(len(asked)))
        logits = runner.forward(batch)
        if len(asked):
            found += _logprobs(logits, asked - 1 - start, tokens[asked], request.temperature)
        await asyncio.sleep(0)
    return found


def _piece(tokens: np.ndarray, slot: int, start: int, *, every_row: bool) -> TokenBatch:
    """Return consecutive tokens of one slot as a batch; without ``every_row`` for their KV alone.

    One row's logits are asked for even then: a batch without any is nobody's ordinary case.
    """
    columns = (np.array([c], np.int64) for c in (slot, start, len(tokens), 0))
    return TokenBatch(tokens, *columns, every_row=every_row)


@torch.inference_mode()
def _logprobs(
    logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, temperature: float
) -> list[float]:
    """Return the logprob of one token after each of some rows of logits ``[N, vocab]``."""
    chosen = logits[torch.from_numpy(rows).to(logits.device)].float() / temperature
    at = torch.from_numpy(tokens).to(logits.device)[:, None]
    logprobs = chosen.log_softmax(-1).gather(1, at).squeeze(1)
    if not bool(logprobs.isfinite().all()):
        raise InferenceFailure("the model's logits are not finite", boundary="engine.score")
    return [float(value) for value in logprobs.tolist()]
