"""The values that an environment returns: check their form, and compare two of them.

Takes: the return values of ``reset`` and ``step``. Gives: checked steps, and the difference between
two steps. Never: calls the environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from rollart_core.rollout.tools.tool_set import ToolSet
from rollart_core.spaces import Messages, Text
from rollart_core.types import Observation
from rollart_testing.results import expect


class Step(NamedTuple):
    """The return value of ``step``, or of ``reset`` with a reward of 0."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated


def difference(one: Step, two: Step) -> str | None:
    """Return how two steps differ, with both values; None if they are equal."""
    for name, a, b in zip(Step._fields, one, two, strict=True):
        if plain(a) != plain(b):
            return f"{name} {shortened(plain(a), 60)} versus {shortened(plain(b), 60)}"
    return None


def plain(value: object) -> Any:
    """Return a value as JSON data; sets are sorted, and memory addresses are removed."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(inner) for inner in value), key=repr)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def texts_of(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every text and number of an info with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path} key", str(key)
            yield from texts_of(f"{path}[{key!r}]", inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for n, inner in enumerate(value):
            yield from texts_of(f"{path}[{n}]", inner)
    elif value is not None and not isinstance(value, bool):
        yield path, str(plain(value))


def checked_reset(answer: object) -> Step:
    """Return the checked return value of ``reset``."""
    expect(
        isinstance(answer, tuple) and len(answer) == 2,
        f"reset returned {_kind(answer)}, not (observation, info)",
    )
    observation, info = cast("tuple[Any, Any]", answer)
    expect_observation("reset", observation)
    _expect_info("reset", info)
    return Step(observation, 0.0, False, False, info)


def checked_step(answer: object) -> Step:
    """Return the checked return value of ``step``."""
    expect(
        isinstance(answer, tuple) and len(answer) == 5,
        f"step returned {_kind(answer)}, not (observation, reward, terminated, truncated, info)",
    )
    observation, reward, terminated, truncated, info = cast("tuple[Any, ...]", answer)
    expect_observation("step", observation)
    is_number = isinstance(reward, int | float | np.number) and not isinstance(reward, bool)
    expect(is_number, f"step's reward is {_kind(reward)}, not a number")
    expect(math.isfinite(reward), f"step's reward is {reward}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        expect(isinstance(flag, bool | np.bool_), f"step's {name} is {_kind(flag)}, not a bool")
    _expect_info("step", info)
    return Step(observation, float(reward), bool(terminated), bool(truncated), info)


def expect_observation(call: str, observation: object) -> None:
    """Fail unless an observation is text or a list of messages."""
    expect(
        observation in Text() or (observation in Messages() and observation),
        f"{call}'s observation is {_kind(observation)}, neither text nor a list of messages",
    )


def _expect_info(call: str, info: object) -> None:
    expect(isinstance(info, dict), f"{call}'s info is {_kind(info)}, not a dict")
    assert isinstance(info, dict)
    success = info.get("success")
    expect(
        success is None or isinstance(success, bool | np.bool_), f"{call}: success is {success!r}"
    )
    actions = info.get("available_actions", [])
    is_texts = isinstance(actions, list | tuple) and all(isinstance(a, str) for a in actions)
    expect(is_texts, f"{call}: available_actions is not a list of strings")
    _expect_tools(call, info.get("tools", ()))
    components = info.get("reward_components", {})
    expect(isinstance(components, dict), f"{call}: reward_components is not a dict")
    for name, value in components.items():
        is_finite = isinstance(value, int | float | np.number) and math.isfinite(value)
        expect(is_finite, f"{call}: reward_components[{name!r}] is {value!r}")


def _expect_tools(call: str, tools: Any) -> None:
    try:
        ToolSet(tools)
    except ValueError as e:
        expect(False, f"{call}: {e}")


def _kind(value: object) -> str:
    if isinstance(value, tuple | list | str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}"[:60]


def shortened(value: object, most: int) -> str:
    """Return a value for a reason, cut to a number of characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
