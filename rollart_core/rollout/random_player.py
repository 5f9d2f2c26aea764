"""What a player does that only draws: among the actions offered, or else calls and words.

Takes: an environment, what it showed last, and a key. Gives: an action, in the form that ``step``
takes. Never: draws from anything but the key.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from rollart_core.tools.action import Call, ToolAction
from rollart_core.types import Observation

_TEMPLATE = re.compile(r"<[^<>]*>")


def drawn_action(env: Any, observation: Observation, info: Mapping[str, Any], key: int) -> str:
    """Return what a random player does in an environment, in the form its ``step`` takes.

    Args:
        env: The environment.
        observation: What it showed last.
        info: What it said with it; of a reset also the tools, where there are any.
        key: What the draws follow from.
    """
    rng, text = random.Random(key), text_of(observation)
    offered = info.get("available_actions")
    tools = info.get("tools")
    if tools and not offered:
        return _tool_action(rng, text, tools)
    space = getattr(env, "action_space", None)
    if not offered and isinstance(space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
        space.seed(key & 0x7FFF_FFFF)  # a space with an alphabet or numbers of its own
        return str(space.sample())
    return random_words(rng, text, offered)


def random_words(rng: random.Random, text: str, offered: Sequence[object] | None) -> str:
    """Return one of the offered actions, its gaps filled with words of the page; or else a word.

    Half of the words are words of the page, so that parroting is tried too.

    Args:
        rng: What is drawn from.
        text: What the environment showed.
        offered: ``info["available_actions"]``.
    """
    words = text.split() or ["ok"]
    if offered:
        return _TEMPLATE.sub(lambda _: rng.choice(words), str(rng.choice(list(offered))))
    if rng.random() < 0.5:
        return rng.choice(words).strip(".,:;!?'\"()")
    letters = "abcdefghijklmnopqrstuvwxyz" if rng.random() < 0.5 else "0123456789"
    return "".join(rng.choices(letters, k=rng.randint(1, 3 if letters[0] == "0" else 8)))


def _tool_action(rng: random.Random, text: str, tools: Sequence[Any]) -> str:
    """Return a call of any tool with arguments that fit its schema, or (half the time) a word."""
    if rng.random() < 0.5:
        return ToolAction(random_words(rng, text, None)).text()
    function = rng.choice(list(tools))["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    arguments = {name: _argument(rng, text, schema) for name, schema in properties.items()}
    return ToolAction("", (Call(function["name"], arguments),)).text()


def _argument(rng: random.Random, text: str, schema: Mapping[str, Any]) -> object:
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    kind = schema.get("type", "string")
    if kind in ("integer", "number"):
        low = int(schema.get("minimum", 0))
        return rng.randint(low, max(low, int(schema.get("maximum", low + 100))))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [_argument(rng, text, schema.get("items") or {})]
    return {} if kind == "object" else random_words(rng, text, None)


def text_of(observation: Observation) -> str:
    """Return an observation as one text."""
    if isinstance(observation, str):
        return observation
    return "\n".join(message["content"] for message in observation)
