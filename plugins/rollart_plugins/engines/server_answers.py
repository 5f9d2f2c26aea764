"""What inference servers answer to a generation, in a form that all their protocols share.

Takes: the parsed response of a server. Gives: a :class:`GenerateResult` in which each token has the
version of the weights that sampled it.
Never: guesses a version. A response whose weight spans do not cover its tokens is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from rollart_core.contracts.inference import FinishReason, GenerateResult
from rollart_core.errors import InferenceFailure
from rollart_core.types import TokenSpan

Json: TypeAlias = dict[str, Any]
KvOrigin: TypeAlias = Literal["fresh", "kept", "recomputed"]
WeightSpan: TypeAlias = tuple[str, int, int]
"""The weight version as the server names it, and ``[start, stop)`` of its tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a server to one generation."""

    server: str
    """The name of the server's program, for errors."""
    token_ids: list[int]
    logprobs: list[float]
    reason: FinishReason
    weights: Sequence[WeightSpan]
    num_prompt_tokens: int = 0
    """0 for a request that was aborted while it waited."""
    num_cached_tokens: int = 0
    """Prompt tokens that the server read from its cache."""

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that the server computed."""
        return max(self.num_prompt_tokens - self.num_cached_tokens, 0)


def generate_result(
    answer: Answer, versions: Mapping[str, int], kv: Sequence[KvOrigin]
) -> GenerateResult:
    """Return the result in a response.

    Args:
        answer: The response.
        versions: The policy version of each weight version of this run.
        kv: The cache origin of the first span, and of the later spans.

    Raises:
        InferenceFailure: If the response lacks required data, or its weights are not of this run.
    """
    if len(answer.logprobs) != len(answer.token_ids):
        raise odd_answer(
            answer.server, f"{len(answer.logprobs)} logprobs for {len(answer.token_ids)} tokens"
        )
    if not all(map(math.isfinite, answer.logprobs)):
        raise InferenceFailure("the model's logits are not finite", boundary="engine.generate")
    return GenerateResult(
        answer.token_ids,
        answer.logprobs,
        _spans(answer, versions, kv),
        answer.reason,
        answer.num_cached_tokens,
    )


def of_adapter(answer: Answer, name: str, base: str) -> Answer:
    """Return an answer whose tokens are all of one adapter, which the request named.

    Args:
        answer: The response, whose weight versions are those of the base model.
        name: Weight version of the adapter.
        base: Weight version of the base model of this run.

    Raises:
        InferenceFailure: If the base model has other weights.
    """
    for version, _, _ in answer.weights:
        if version != base:
            raise odd_answer(
                answer.server,
                f"the weights below its adapter are {version!r}, not those of this run; another "
                "run must not use the same server",
            )
    num_tokens = len(answer.token_ids)
    return replace(answer, weights=[(name, 0, num_tokens)] if num_tokens else [])


def odd_answer(server: str, what: str) -> InferenceFailure:
    """Return the error for a response that cannot be used."""
    return InferenceFailure(f"the {server} server's answer: {what}", boundary="engine.generate")


def _spans(
    answer: Answer, versions: Mapping[str, int], kv: Sequence[KvOrigin]
) -> tuple[TokenSpan, ...]:
    num_tokens = len(answer.token_ids)
    if not num_tokens:
        return ()
    spans: list[TokenSpan] = []
    for version, start, stop in answer.weights:
        if version not in versions:
            raise odd_answer(
                answer.server,
                f"its weights are {version!r}, which are not of this run; another run must not "
                "use the same server",
            )
        if stop > start:
            spans.append(TokenSpan(start, stop, versions[version], kv[bool(spans)]))
    bounds = [0, *(s.stop for s in spans)]
    if [s.start for s in spans] != bounds[:-1] or bounds[-1] != num_tokens:
        given = list(answer.weights)
        raise odd_answer(
            answer.server, f"weight_versions {given} do not cover its {num_tokens} tokens"
        )
    return tuple(spans)
