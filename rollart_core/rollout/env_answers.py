"""Results of environments, which are validated and converted before they leave the worker.

Takes: the results of ``reset``, ``step`` and an agent's ``finish``. Gives: :class:`Observed` and
:class:`AgentResult` with plain values, and observations within the length limit. Never: calls an
environment, or repairs a result that violates the contract.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rollart_core.contracts.agent import AgentResult
from rollart_core.contracts.reward_check import SLACK
from rollart_core.errors import first_line
from rollart_core.types import Message, Observation, ToolCall, ToolSpec

MAX_CONTEXT_BYTES: Final = 1_000_000
"""Maximum size of ``info["reward_context"]``, which is sent with every reward request."""
MAX_REWARD: Final = 1e6
"""Maximum absolute return of an episode if its environment declares no range."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The next observation of the policy, with the other results of ``env.step``."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    invalid_action: bool = False
    cut_chars: int = 0
    """Number of characters of the observation that were left out."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools of this episode; set by a reset."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """The context for the run's reward: ``info["reward_context"]``."""

    @property
    def done(self) -> bool:
        """True when the episode is over."""
        return self.terminated or self.truncated


def observed(
    observation: Any, reward: Any, ends: tuple[Any, Any], info: Any, *, max_chars: int
) -> Observed:
    """Return the result of ``reset`` or ``step`` as a record.

    Args:
        observation: The next observation of the policy.
        reward: The reward of the step; 0 for a reset.
        ends: ``terminated`` and ``truncated``.
        info: The info of the environment.
        max_chars: The maximum length; longer observations are cut in the middle.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a reward or a component is not finite, or the reward context is not plain
            JSON.
    """
    value = _number(reward, "reward")
    if not isinstance(info, Mapping):
        raise TypeError(f"info must be a dict, not {type(info).__name__}")
    text, num_cut = _bounded(_checked(observation), max_chars)
    success = info.get("success")
    context = info.get("reward_context")
    return Observed(
        observation=text,
        reward=value,
        terminated=_flag(ends[0], "terminated"),
        truncated=_flag(ends[1], "truncated"),
        success=None if success is None else _flag(success, "success"),
        components=_components(info.get("reward_components")),
        invalid_action=bool(info.get("invalid_action", False)),
        cut_chars=num_cut,
        context=_context(context) if context else {},
    )


def agent_result(result: AgentResult) -> AgentResult:
    """Return the result of an agent task as plain values.

    Raises:
        ValueError: If its reward is not finite, or its context is not plain JSON.
    """
    reward = _number(result.reward, "reward")
    success = None if result.success is None else _flag(result.success, "success")
    components = _components(result.components)
    context = _context(result.context) if result.context else {}
    truncated = _flag(result.truncated, "truncated")
    return AgentResult(reward, success, components, truncated, context)


def return_problem(value: float, reward_range: tuple[float, float] | None) -> str:
    """Return a message if the return of an episode is invalid, else an empty string.

    Args:
        value: The return: the sum of the rewards.
        reward_range: The range that the environment declares; None if it declares none.
            ``MAX_REWARD`` replaces an infinite bound.
    """
    if not math.isfinite(value):
        return f"the return is {value}"
    low, high = reward_range or (-math.inf, math.inf)
    low, high = (low, high) if math.isfinite(low) else (-MAX_REWARD, high)
    high = high if math.isfinite(high) else MAX_REWARD
    if low - SLACK <= value <= high + SLACK:
        return ""
    declared = "its spec's reward_range" if reward_range else "what is allowed without a range"
    return f"the return {value:g} is outside {declared}, {low:g} to {high:g}"


def _number(value: Any, name: str) -> float:
    """Return a finite number as a float; scalars of numpy and torch are allowed."""
    try:
        if not isinstance(value, str | bytes) and math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError, ValueError):  # not a number, a huge int, or an array
        pass
    shown = first_line(repr(value), 80)
    if isinstance(value, float):
        raise ValueError(f"{name} is {shown}")
    raise TypeError(f"{name} must be a finite number, not {type(value).__name__}: {shown}")


def _flag(value: Any, name: str) -> bool:
    """Return a bool; a numpy bool is allowed."""
    is_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if isinstance(value, bool) or is_numpy:
        return bool(value)
    raise TypeError(
        f"{name} must be a bool, not {type(value).__name__}: {first_line(repr(value), 80)}"
    )


def _components(parts: Any) -> dict[str, float]:
    if parts is None:
        return {}
    if not isinstance(parts, Mapping):
        raise TypeError(f"reward_components must be a dict, not {type(parts).__name__}")
    return {str(k): _number(v, f"reward_components[{str(k)!r}]") for k, v in parts.items()}


def _context(value: Any) -> dict[str, Any]:
    """Return the reward context as plain JSON.

    Raises:
        ValueError: If it is not plain JSON, or larger than ``MAX_CONTEXT_BYTES``.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ValueError(f"reward_context must be plain JSON: {e}") from e
    if not isinstance(value, Mapping):
        raise ValueError(f"reward_context must be a dict, not {type(value).__name__}")
    if len(text) > MAX_CONTEXT_BYTES:
        raise ValueError(
            f"reward_context has {len(text)} bytes, more than {MAX_CONTEXT_BYTES}: pass a "
            "reference, such as a path or an id, and load large data in the reward"
        )
    plain: dict[str, Any] = json.loads(text)
    return plain


def _checked(observation: Any) -> Observation:
    """Return a valid observation, without lone surrogates, which tokenizers do not accept."""
    if isinstance(observation, str):
        return _encodable(observation)
    if isinstance(observation, list) and all(_is_message(m) for m in observation):
        return [_plain(m) for m in observation]
    raise TypeError(
        f"observation must be str or list of messages, not {type(observation).__name__}"
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _plain(message: Mapping[str, Any]) -> Message:
    """Return the message with only its text and its tool fields."""
    plain = Message(role=message["role"], content=_encodable(message["content"]))
    if isinstance(message.get("tool_call_id"), str):
        plain["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        plain["name"] = message["name"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(
        id=str(call["id"]),
        type="function",
        function={"name": str(function["name"]), "arguments": str(function["arguments"])},
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _bounded(observation: Observation, limit: int) -> tuple[Observation, int]:
    if isinstance(observation, str):
        return cut(observation, limit)
    num_cut = 0
    for message in observation:
        message["content"], more = cut(message["content"], limit)
        num_cut += more
    return observation, num_cut


def cut(text: str, limit: int) -> tuple[str, int]:
    """Cut the middle of a text that is too long; return it and the number of cut characters."""
    if len(text) <= limit:
        return text, 0
    left = len(text) - limit
    return f"{text[: limit // 2]}\n[… {left} characters left out …]\n{text[-(limit // 2) :]}", left
