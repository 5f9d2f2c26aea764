"""The random player, which draws from the offered actions, else from tool calls and words.

Evaluations and ``rollart check`` use the same player. :mod:`rollart_core.rollout.tools.draw` draws
the calls.

Takes: an environment, its last observation, and a key. Gives: an action for ``step``. Never: uses
randomness other than the key.
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
    """Return a random action for the ``step`` of an environment.

    Args:
        env: The environment.
        observation: Its last observation.
        info: The info of that observation, with the tools of the episode if there are any.
        key: The seed of the draws.
        share_of_calls: If there are tools: the probability of a tool call instead of a word.
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
        space.seed(key & 0x7FFF_FFFF)  # the space defines the alphabet or the numbers
        return str(space.sample())
    return random_words(rng, text, offered)


def random_words(rng: random.Random, text: str, offered: Sequence[object] | None) -> str:
    """Return an offered action, with its gaps filled with words of the text, or else a word.

    Half of the words are from the text, so that repeating the observation is tried too.

    Args:
        rng: The random generator.
        text: The observation as text.
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
