"""A reward function for platforms that call plain functions: AWS Lambda, functions-framework.

Takes: the environment variables ``ROLLART_REWARD`` (an id) and ``ROLLART_REWARD_OPTIONS`` (JSON).
Gives: answers to calls from any thread. Never: creates the reward more than once in a process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from rollart_core.errors import ConfigError, UserError, first_line
from rollart_core.rollout import loop
from rollart_plugins.serverless.function import RewardFunction
from rollart_plugins.serverless.wire import Refused

REWARD: Final = "ROLLART_REWARD"
OPTIONS: Final = "ROLLART_REWARD_OPTIONS"


class BlockingFunction:
    """A :class:`RewardFunction` for callers without an event loop."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def answer(self, body: bytes | Mapping[str, Any]) -> bytes:
        """Answer a call.

        Raises:
            Refused: If it is not a call, or is one for another reward.
        """
        return loop.run(self.function.answer(body))


def answered(body: bytes | Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the kind of a refusal (empty: none), and the body of the answer."""
    try:
        return "", _function().answer(body)
    except Refused as e:
        return e.kind, e.body()
    except UserError as e:
        return "broken", Refused("broken", first_line(str(e))).body()


@cache
def _function() -> BlockingFunction:
    """Return the one function of this process.

    Raises:
        UserError: If the variables do not define a reward.
    """
    reward_id = os.environ.get(REWARD, "")
    if not reward_id:
        raise ConfigError(
            f"the environment variable {REWARD} is not set; set it to the id of a reward"
        )
    try:
        options = json.loads(os.environ.get(OPTIONS) or "{}")
    except ValueError as e:
        raise ConfigError(f"{OPTIONS} is not valid JSON: {first_line(str(e))}") from e
    if not isinstance(options, dict):
        raise ConfigError(f"{OPTIONS} must be a JSON object, such as " + '{"weight": 2}')
    return BlockingFunction(RewardFunction(reward_id, options))
