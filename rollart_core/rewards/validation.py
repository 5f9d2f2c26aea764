"""Requests to rewards and their results: trimming, idempotency keys, validation.

Takes: requests and results. Gives: requests with only the needed data, a key for each call, and
results that are finite and in range. Never: fixes a result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any, Final

from rollart_core.contracts.reward import Need, RewardRef, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import result_problem
from rollart_core.errors import RewardFailure

_FIELDS: Final = tuple(field.name for field in fields(RewardRequest))
_EMPTY: Final[dict[Need, Any]] = {
    "messages": (),
    "context": {},
    "env_return": 0.0,
    "success": None,
    "components": {},
}
"""The default of each field that a reward does not need."""


def trimmed(request: RewardRequest, needs: Sequence[Need] | None) -> RewardRequest:
    """Return a request with only the episode data that the reward needs."""
    if needs is None:
        return request
    left_out = {name: empty for name, empty in _EMPTY.items() if name not in needs}
    if "answer" in needs and "messages" not in needs:
        said = [m for m in request.messages if m["role"] == "assistant"][-1:]
        left_out["messages"] = tuple(said)
    return replace(request, **left_out)


def idempotency_key(reward: RewardRef, requests: Sequence[RewardRequest]) -> str:
    """Return the key of a call: the same for the same reward, options and requests."""
    told = [[getattr(request, name) for name in _FIELDS] for request in requests]
    text = json.dumps([reward.id, reward.options, told], sort_keys=True, default=_plain)
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def checked_result(result: object, reward_range: tuple[float, float]) -> RewardResult:
    """Return a validated result.

    Raises:
        RewardFailure: If it is not a result, not finite, or out of range.
    """
    problem = result_problem(result, reward_range)
    if problem:
        raise RewardFailure(f"reward.score answered {problem}", boundary="reward.score")
    assert isinstance(result, RewardResult)
    return result


def _plain(value: object) -> object:
    """Convert a value that JSON does not support."""
    return dict(value) if isinstance(value, Mapping) else str(value)
