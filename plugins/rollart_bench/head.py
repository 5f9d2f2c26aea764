"""`rollart bench head`: logprobs and entropies of many tokens, without a tensor of all logits.

Memory: the largest amount beyond weights, hidden states and their gradients during a forward and a
backward pass, in a fresh process. Without CUDA it is the growth of the largest resident set size.

Time: ours chooses between one computation and chunks, as a trainer does. The peer computes all
logits at once, with torch's own gradients. The small case has the sizes of the WebShop example.

Takes: ``tokens``, ``vocabulary`` and ``width`` (of the memory), ``pairs``, ``short`` (small sizes).
Gives: rows. Never: loads a model.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import in_fresh_process

if TYPE_CHECKING:
    from torch import Tensor

TAKES: Final = ("tokens", "vocabulary", "width", "pairs", "short")
SIZES: Final = {"tokens": 32_768, "vocabulary": 152_000, "width": 1024}
SHORT: Final = {"tokens": 512, "vocabulary": 4_000, "width": 64}
TIMED: Final = {
    "small": {"tokens": 3_840, "vocabulary": 1_000, "width": 128},
    "large": {"tokens": 1_024, "vocabulary": 152_000, "width": 1024},
}
MOST_BYTES: Final = 2 * 10**9
LEAST_RATIO: Final = round(1 / 1.3, 2)
PEER: Final = "all logits at once"


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``tokens``, ``vocabulary``, ``width``, ``pairs`` and ``short``.
    """
    given = Options("head", options)
    short = given.flag("short")
    standard = SHORT if short else SIZES
    sizes = {name: given.integer(name, standard[name]) for name in SIZES}
    pairs = given.integer("pairs", 1 if short else 5)
    memory = in_fresh_process(f"{__name__}:measure_memory", sizes)
    echo(f"{memory['bytes'] / 1e9:.2f} GB in {memory['seconds']:.0f} s on {memory['device']}")
    used = row(
        f"{_case(sizes)}: memory beyond weights and gradients",
        memory["bytes"],
        None,
        None,
        "bytes",
        mark=f"at most {MOST_BYTES}",
        meets_mark=memory["bytes"] <= MOST_BYTES,
        required=True,
    )
    times = [_time_row(name, pairs) for name in TIMED if not (short and name == "large")]
    return result("head", [used, *times], conditions={"device": memory["device"]})


def _time_row(name: str, pairs: int) -> dict[str, object]:
    found = in_fresh_process(f"{__name__}:measure_time", {**TIMED[name], "pairs": pairs})
    ours, peer = found["ours"], found["peer"]
    case = f"{name}, {_case(TIMED[name])}: time"
    echo(f"{case}: {min(ours):.3f} s, peer {min(peer):.3f} s")
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    return row(case, min(ours), min(peer), PEER, "s", ratios=ratios, mark=LEAST_RATIO)


def _case(sizes: Mapping[str, int]) -> str:
    tokens, vocabulary, width = (sizes[name] for name in SIZES)
    return f"{tokens:,} tokens, vocabulary {vocabulary:,}, width {width:,}"


def measure_memory(sizes: Mapping[str, Any]) -> dict[str, object]:
    """Return the peak memory of a forward and a backward pass in chunks, and its duration."""
    import torch

    from rollart_core.training.head import Scoring, Targets, score_in_chunks

    hidden, weight, tokens = _inputs(sizes)
    scoring, all_targets = Scoring(entropy_gradient=True), Targets.one_per_row(tokens)
    torch.ones(2, 2, requires_grad=True).matmul(torch.ones(2, 2)).sum()  # loads libraries
    before, began = _held_bytes(), time.perf_counter()
    values, entropy = score_in_chunks(hidden, (weight, None), all_targets, scoring)
    _backward(values + entropy)
    peak_bytes = _peak_bytes() - before
    device = "CUDA" if torch.cuda.is_available() else "CPU"
    return {"bytes": peak_bytes, "seconds": time.perf_counter() - began, "device": device}


def measure_time(sizes: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the durations of a forward and a backward pass, by side, in interleaved pairs."""
    import torch
    from torch.nn.functional import linear

    from rollart_core.training.head import Scoring, Targets, chunk_rows, score, score_in_chunks

    hidden, weight, tokens = _inputs(sizes)
    targets = Targets.one_per_row(tokens)

    def ours() -> Tensor:
        if len(hidden) <= chunk_rows(len(weight)):
            return score(linear(hidden, weight), targets)[0]
        return score_in_chunks(hidden, (weight, None), targets, Scoring())[0]

    def peer() -> Tensor:
        logp = torch.log_softmax(linear(hidden, weight), dim=-1)
        with torch.no_grad():
            torch.sum(logp.exp() * logp, dim=-1).neg_()  # the entropy, as a metric
        return logp[targets.rows, targets.tokens]

    found: dict[str, list[float]] = {"ours": [], "peer": []}
    for pair in range(sizes["pairs"] + 1):
        for name, side in (("ours", ours), ("peer", peer)):
            began = time.perf_counter()
            _backward(side())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if pair:  # the first is a warm-up
                found[name].append(time.perf_counter() - began)
    return found


def _backward(values: Tensor) -> None:
    values.sum().backward()  # type: ignore[no-untyped-call]


def _inputs(sizes: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states and weight with gradients of zeros, and tokens."""
    import torch

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_tokens, vocabulary, width = (sizes[name] for name in SIZES)
    hidden, weight = (torch.empty(n, width, device=device) for n in (num_tokens, vocabulary))
    for tensor, std in ((hidden, 1.0), (weight, 0.02)):
        tensor.normal_(std=std).requires_grad_()
        tensor.grad = torch.zeros_like(tensor).add_(0)  # its pages exist
    return hidden, weight, torch.randint(vocabulary, (num_tokens,), device=device)


def _held_bytes() -> int:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return _peak_bytes()


def _peak_bytes() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
