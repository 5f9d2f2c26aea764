"""The cross-check: trainer and engine must agree on the logprobs of the engine's answers.

Both have the same weights before the first update. A large difference means that they compute
different distributions, so that importance ratios would be wrong from the first batch on.

Takes: samples of the initial policy, and the trainer's logprobs of their tokens. Gives: figures of
the difference, and an error that names what to inspect. Never: imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from rollart_core.errors import LogprobMismatch
from rollart_core.types import FloatArray, Sample

NUM_ANSWERS: Final = 64
"""Number of compared answers."""
_APART: Final = 3.0
"""Ratio of two mean differences from which on their cause differs."""
_TAIL: Final = 0.05
_CONCENTRATED: Final = 0.8
"""Share of the whole difference in the largest twentieth that points to single tokens."""

CAUSES: Final[Mapping[str, str]] = {
    "turns": "only turns after the first one differ: inspect the chat template, and whether the "
    "server tokenizes earlier answers again",
    "tokens": "few tokens cause it: inspect sampling options of the server (top_p, top_k, "
    "penalties) and, for a mixture of experts, the precision of the router",
    "length": "it grows with the position: inspect rope scaling and the context length",
    "all": "all tokens differ: inspect rollout.temperature, model.dtype, a tied output head, and "
    "whether the engine has the weights of model.path",
}
"""Pattern of the difference -> what to inspect."""


def differences(samples: Sequence[Sample], rows: Sequence[FloatArray]) -> dict[str, float]:
    """Return figures of the difference between the trainer's and the engine's logprobs.

    The KL divergence is the estimator ``exp(d) - 1 - d`` of the engine's policy from the
    trainer's (Schulman 2020, "Approximating KL Divergence", k3).

    Args:
        samples: Samples with loss tokens.
        rows: The trainer's logprobs, one ``[T]`` row per sample.

    Returns:
        Absolute differences in nats: ``mean``, ``max``, ``first_turn`` and ``later_turns``,
        ``early`` and ``late`` (by the median position). ``tail_share`` is the share of the largest
        twentieth. Then ``kl``, ``tokens`` and ``answers``.
    """
    masks = [s.loss_mask for s in samples]
    signed = np.concatenate(
        [row - s.inference_logprobs for row, s in zip(rows, samples, strict=True)]
    )
    mask = np.concatenate(masks)
    signed, size = signed[mask].astype(np.float64), np.abs(signed[mask]).astype(np.float64)
    is_first = np.concatenate([s.turn_ids == s.turn_ids[s.loss_mask].min() for s in samples])[mask]
    places = np.concatenate([np.arange(s.num_tokens) for s in samples])[mask]
    is_early = places <= np.median(places)
    tail = np.sort(size)[-max(1, int(_TAIL * len(size))) :]
    return {
        "mean": float(size.mean()),
        "max": float(size.max()),
        "kl": float((np.exp(signed) - 1 - signed).mean()),
        "first_turn": _mean(size[is_first]),
        "later_turns": _mean(size[~is_first]),
        "early": _mean(size[is_early]),
        "late": _mean(size[~is_early]),
        "tail_share": float(tail.sum() / max(size.sum(), 1e-30)),
        "tokens": float(len(size)),
        "answers": float(len(samples)),
    }


def check_agreement(figures: Mapping[str, float], most: float) -> None:
    """Compare the mean difference with its limit.

    Args:
        figures: Those of :func:`differences`.
        most: Largest mean absolute difference, in nats per token.

    Raises:
        LogprobMismatch: If it is larger; the error names what to inspect.
    """
    if figures["mean"] <= most:
        return
    raise LogprobMismatch(
        f"trainer and engine disagree on {figures['answers']:.0f} answers before the first update: "
        f"their logprobs differ by {figures['mean']:.3g} nats per token (at most "
        f"{figures['max']:.3g}), and trainer.max_logprob_mismatch is {most:g}; "
        f"{CAUSES[_pattern(figures)]}"
    )


def _pattern(figures: Mapping[str, float]) -> str:
    if figures["later_turns"] > _APART * figures["first_turn"]:
        return "turns"
    if figures["tail_share"] > _CONCENTRATED:
        return "tokens"
    return "length" if figures["late"] > _APART * figures["early"] else "all"


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
