"""One ``generate`` call while the engine works on it.

Takes: a :class:`GenerateRequest`. Gives: what is still to be done and, at the end, the result.
Never: touches the model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from rollart_core.contracts.inference import FinishReason, GenerateRequest, GenerateResult
from rollart_core.errors import InferenceFailure
from rollart_core.types import TokenSpan
from rollart_cpu.inference.runner import Int64Array
from rollart_plugins.engines.sessions import KvOrigin, Session


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that waits or runs."""

    request: GenerateRequest
    prompt: Int64Array
    """``[P]``."""
    limit: int
    """Most new tokens, with what room the context leaves."""
    future: asyncio.Future[GenerateResult]
    stops: frozenset[int]
    session: Session | None = None
    num_cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    origins: list[tuple[int, tuple[int, KvOrigin]]] = field(default_factory=list)
    """First token, and policy_version and cache of all up to the next."""

    def append(self, token: int, logprob: float, policy_version: int) -> FinishReason | None:
        """Take one sampled token; says whether and why that was the last."""
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
        """Which version sampled which tokens."""
        stops = [start for start, _ in self.origins[1:]] + [len(self.token_ids)]
        return tuple(
            TokenSpan(start, stop, version, kv)
            for (start, (version, kv)), stop in zip(self.origins, stops, strict=False)
        )  # not strict: a request that is aborted early has no origin and one stop

    def resolve(self, reason: FinishReason) -> None:
        """Answer the caller, unless it has gone."""
        if not self.future.done():
            self.future.set_result(
                GenerateResult(self.token_ids, self.logprobs, self.spans, reason, self.num_cached)
            )

    def reject(self, error: InferenceFailure) -> None:
        """Raise in the caller, unless it has gone."""
        if not self.future.done():
            self.future.set_exception(error)


def check_request(request: GenerateRequest, *, vocab_size: int, max_tokens: int) -> Int64Array:
    """Return the prompt as an array.

    Raises:
        InferenceFailure: When the request can never be answered; it is not worth a retry.
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
            f"the prompt of {len(prompt)} tokens leaves no room in a context of {max_tokens}"
        )
    if request.max_new_tokens < 1:
        raise refusal(f"max_new_tokens is {request.max_new_tokens}, at least 1 is needed")
    if not 0 <= request.temperature < float("inf"):
        raise refusal(f"temperature is {request.temperature}, 0 or more is needed")
    return prompt


def refusal(message: str) -> InferenceFailure:
    """Return an error that is not worth a retry."""
    error = InferenceFailure(message, boundary="engine.generate")
    error.retryable = False
    return error
