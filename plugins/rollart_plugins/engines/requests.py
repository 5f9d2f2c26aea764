"""One ``generate`` call during its processing by the engine.

Takes: a :class:`GenerateRequest`. Gives: the remaining work and, at the end, the result.
Never: runs the model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rollart_core.contracts.inference import FinishReason, GenerateRequest, GenerateResult
from rollart_core.errors import InferenceFailure
from rollart_core.types import TokenSpan
from rollart_cpu.inference.kernels import load_kernels
from rollart_cpu.inference.runner import Int64Array
from rollart_plugins.engines.sessions import KvOrigin, Session


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A waiting or running request."""

    request: GenerateRequest
    prompt: Int64Array
    """``[P]``: the token ids of the prompt."""
    limit: int
    """Maximum number of new tokens, limited by the remaining context."""
    future: asyncio.Future[GenerateResult]
    stops: frozenset[int]
    session: Session | None = None
    num_cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    origins: list[tuple[int, tuple[int, KvOrigin]]] = field(default_factory=list)
    """First token of each span, with the policy_version and cache origin up to the next span."""

    def append(self, token: int, logprob: float, policy_version: int) -> FinishReason | None:
        """Add one sampled token; return the finish reason if it was the last, else None."""
        assert self.session is not None
        origin = (policy_version, self.session.kv)
        if not self.origins or self.origins[-1][1] != origin:
            self.origins.append((len(self.token_ids), origin))
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stops:
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None

    @property
    def spans(self) -> tuple[TokenSpan, ...]:
        """The spans of tokens, each with the version that sampled it."""
        stops = [start for start, _ in self.origins[1:]] + [len(self.token_ids)]
        return tuple(
            TokenSpan(start, stop, version, kv)
            for (start, (version, kv)), stop in zip(self.origins, stops, strict=False)
        )  # not strict: an early aborted request has no origin and one stop

    def resolve(self, reason: FinishReason) -> None:
        """Return the result to the caller, unless it was cancelled."""
        if not self.future.done():
            self.future.set_result(
                GenerateResult(self.token_ids, self.logprobs, self.spans, reason, self.num_cached)
            )

    def reject(self, error: InferenceFailure) -> None:
        """Raise in the caller, unless it was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


def check_request(request: GenerateRequest, *, vocab_size: int, max_tokens: int) -> Int64Array:
    """Return the prompt as an array.

    Raises:
        InferenceFailure: If the request cannot be answered; a retry does not help.
    """
    try:
        prompt = np.asarray(request.token_ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as e:
        raise refusal(f"token ids must be integers: {e}") from e
    if prompt.ndim != 1 or not len(prompt):
        raise refusal("the prompt is empty")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        bad = int(prompt.min()) if prompt.min() < 0 else int(prompt.max())
        raise refusal(f"token id {bad} is not in the vocabulary of {vocab_size}")
    if len(prompt) >= max_tokens:
        raise refusal(
            f"the prompt of {len(prompt)} tokens leaves no space in a context of {max_tokens}"
        )
    if request.max_new_tokens < 1:
        raise refusal(f"max_new_tokens is {request.max_new_tokens}, but must be at least 1")
    if not 0 <= request.temperature < float("inf"):
        raise refusal(f"temperature is {request.temperature}, but must be 0 or more")
    return prompt


def refusal(message: str) -> InferenceFailure:
    """Return an error that is not retryable."""
    error = InferenceFailure(message, boundary="engine.generate")
    error.retryable = False
    return error


_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BITS = 48
"""Number of hash bits in a uniform; few enough that ``u * total < total`` in double precision."""


def uniforms(
    keys: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Return one uniform in (0, 1) for each (key, counter), by SplitMix64.

    The generator's state is ``key + (counter + 1) * golden ratio``, hashed by its output function
    (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).
    """
    z = keys + (counters + np.uint64(1)) * _STEP
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    drawn = (z >> np.uint64(64 - _BITS)).astype(np.float64)
    return np.asarray((drawn + 0.5) * 2.0**-_BITS)


@dataclass(slots=True)
class Draws:
    """The sampling parameters of ``R`` rows."""

    temperatures: npt.NDArray[np.float32]
    """``[R]``; 0 is greedy, with the logprobs of temperature 1."""
    keys: npt.NDArray[np.uint64]
    """``[R]``; keys of the random number generator."""
    counters: npt.NDArray[np.uint64]
    """``[R]``; index of the token within the answer."""

    @property
    def inverse_temperatures(self) -> npt.NDArray[np.float32]:
        """``[R]``; inverse temperatures, 1 for greedy rows."""
        t = self.temperatures
        return (1.0 / np.where(t > 0, t, 1.0)).astype(np.float32)

    @property
    def targets(self) -> npt.NDArray[np.float64]:
        """``[R]``; uniforms, -1 for greedy rows."""
        return np.where(self.temperatures > 0, uniforms(self.keys, self.counters), -1.0)


def sample(logits: torch.Tensor, draws: Draws, *, native: bool) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverse CDF.

    Args:
        logits: ``[R, vocab]`` float32.
        draws: The sampling parameters.
        native: Use the compiled sampler, which requires logits on the CPU.

    Returns:
        The tokens (-1 for a row with non-finite logits) and their logprobs.
    """
    kernels = load_kernels() if native else None
    if kernels is None:
        return _sample_torch(logits, draws)
    num, vocab = logits.shape
    tokens, logprobs = np.empty(num, np.int64), np.empty(num, np.float32)
    inverse, targets = draws.inverse_temperatures, draws.targets
    kernels.rollart_sample(
        logits.data_ptr(),
        inverse.ctypes.data,
        targets.ctypes.data,
        tokens.ctypes.data,
        logprobs.ctypes.data,
        num,
        vocab,
    )
    return tokens.tolist(), logprobs.tolist()


@torch.inference_mode()
def _sample_torch(logits: torch.Tensor, draws: Draws) -> tuple[list[int], list[float]]:
    inverse = torch.from_numpy(draws.inverse_temperatures).to(logits.device)
    targets = torch.from_numpy(draws.targets).to(logits.device)
    logprobs = (logits * inverse[:, None]).log_softmax(-1)
    cdf = logprobs.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cdf, (targets.clamp(min=0.0) * cdf[:, -1])[:, None], right=True)
    drawn = drawn.squeeze(1).clamp(max=logits.shape[1] - 1)
    tokens = torch.where(targets < 0, logits.argmax(-1), drawn)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    finite = logits.isfinite().all(-1)
    tokens = torch.where(finite, tokens, -1)
    return tokens.tolist(), torch.where(finite, chosen, 0.0).tolist()
