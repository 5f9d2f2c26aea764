"""What environments answer, checked and made plain before it leaves the worker.

Takes: what ``reset``, ``step`` and an agent's ``finish`` returned. Gives: :class:`Observed` and
:class:`AgentResult` of plain values, observations no longer than allowed. Never: calls an
environment, or mends an answer that has another form than the contract's.
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
"""What an environment hands to its reward travels with every request."""
MAX_REWARD: Final = 1e6
"""How large the return of an episode may be where its environment declares no range."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the policy sees next, and what ``env.step`` said of it."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    invalid_action: bool = False
    cut_chars: int = 0
    """How many characters of the observation were left out."""
    tools: tuple[ToolSpec, ...] = ()
    """What the policy may call in this episode; of a reset."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """What the run's reward is to know: ``info["reward_context"]``."""

    @property
    def done(self) -> bool:
        """True when the episode is over."""
        return self.terminated or self.truncated


def observed(
    observation: Any, reward: Any, ends: tuple[Any, Any], info: Any, *, max_chars: int
) -> Observed:
    """Return an answer of ``reset`` or ``step`` as a record.

    Args:
        observation: What the policy sees next.
        reward: Of the step; 0 for a reset.
        ends: Whether it terminated, and whether it was truncated.
        info: As the environment gave it.
        max_chars: Longer observations are cut in the middle.

    Raises:
        TypeError: When it has another form than the contract's.
        ValueError: When a reward or a component is not finite, or what the reward is to know is no
            plain JSON.
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
        ValueError: When its reward is not finite, or its context is no plain JSON.
    """
    reward = _number(result.reward, "reward")
    success = None if result.success is None else _flag(result.success, "success")
    components = _components(result.components)
    context = _context(result.context) if result.context else {}
    truncated = _flag(result.truncated, "truncated")
    return AgentResult(reward, success, components, truncated, context)


def return_problem(value: float, reward_range: tuple[float, float] | None) -> str:
    """Return what is wrong with the return of an episode; empty if nothing is.

    Args:
        value: The sum of its rewards.
        reward_range: As its environment declares it; None: it declares none. Where it has no end,
            ``MAX_REWARD`` is the limit.
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
    """Return a finite number as a float; numpy's and torch's scalars are numbers too."""
    try:
        if not isinstance(value, str | bytes) and math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError, ValueError):  # no number, a huge int, an array of several
        pass
    shown = first_line(repr(value), 80)
    if isinstance(value, float):
        raise ValueError(f"{name} is {shown}")
    raise TypeError(f"{name} must be a finite number, not {type(value).__name__}: {shown}")


def _flag(value: Any, name: str) -> bool:
    """Return a bool; numpy's is one too."""
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
    """Return what the reward is to know as plain JSON.

    Raises:
        ValueError: When it is none, or larger than ``MAX_CONTEXT_BYTES``.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ValueError(f"reward_context must be plain JSON: {e}") from e
    if not isinstance(value, Mapping):
        raise ValueError(f"reward_context must be a dict, not {type(value).__name__}")
    if len(text) > MAX_CONTEXT_BYTES:
        raise ValueError(
            f"reward_context has {len(text)} bytes, more than {MAX_CONTEXT_BYTES}: let the reward "
            "find large things by itself, and hand it only what to look for"
        )
    plain: dict[str, Any] = json.loads(text)
    return plain


def _checked(observation: Any) -> Observation:
    """Return the observation if it is one, without lone surrogates (no tokenizer takes them)."""
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
    """Return the message with what it says of tools, and nothing else."""
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
    """Return a text with its middle left out where it is longer, and by how many characters."""
    if len(text) <= limit:
        return text, 0
    left = len(text) - limit
    return f"{text[: limit // 2]}\n[… {left} characters left out …]\n{text[-(limit // 2) :]}", left
