"""Players that need no model: they draw among the actions offered, or else calls and words.

Evaluations and ``rollart check`` play the same; calls are :mod:`rollart_core.rollout.tools.draw`'s.

Takes: an environment, what it showed last, and a key. Gives: an action, in the form that ``step``
takes. Never: draws from anything but the key.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium

from rollart_core.rollout.tools.action import ToolAction
from rollart_core.rollout.tools.draw import drawn_call
from rollart_core.types import Observation

_TEMPLATE = re.compile(r"<[^<>]*>")


def drawn_action(
    env: Any,
    observation: Observation,
    info: Mapping[str, Any],
    key: int,
    *,
    share_of_calls: float = 0.5,
) -> str:
    """Return what a random player does in an environment, in the form its ``step`` takes.

    Args:
        env: The environment.
        observation: What it showed last.
        info: What it said with it; of a reset also the tools, where there are any.
        key: What the draws follow from.
        share_of_calls: How often it calls one of the tools, if there are any, and not says a word.
    """
    rng, text = random.Random(key), text_of(observation)
    offered = info.get("available_actions")
    tools = info.get("tools")
    if tools and not offered:
        word = partial(random_words, rng, text, None)
        if rng.random() >= share_of_calls:
            return ToolAction(word()).text()
        return ToolAction("", (drawn_call(rng, tools, word),)).text()
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


def text_of(observation: Observation) -> str:
    """Return an observation as one text."""
    if isinstance(observation, str):
        return observation
    return "\n".join(message["content"] for message in observation)
