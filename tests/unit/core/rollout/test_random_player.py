"""Players that draw."""

import json
import random

import gymnasium
import pytest

from rollart_core.rollout.random_player import drawn_action, random_words
from rollart_core.spaces import Text

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "count": {"type": "integer", "minimum": 2, "maximum": 3},
                "how": {"enum": ["up", "down"]},
            },
        },
    },
}


class Env:
    def __init__(self, space):
        self.action_space = space


def draws(env, info, text="red or blue", n=60):
    return {drawn_action(env, text, info, key) for key in range(n)}


def test_offered_actions_are_drawn_and_their_gaps_filled_from_the_page():
    info = {"available_actions": ["left", "search[<words>]"]}
    assert draws(Env(Text()), info) == {"left", *(f"search[{w}]" for w in ("red", "or", "blue"))}


def test_without_offers_words_of_the_page_are_tried_and_others():
    found = draws(Env(Text()), {})
    assert {"red", "blue"} < found
    assert len(found) > 10


def test_a_space_with_an_alphabet_of_its_own_is_sampled():
    space = gymnasium.spaces.Text(4, min_length=4, charset="xy")
    assert all(len(a) == 4 and set(a) <= {"x", "y"} for a in draws(Env(space), {}))
    assert draws(Env(gymnasium.spaces.Discrete(3)), {}) == {"0", "1", "2"}


def test_tools_are_called_with_arguments_that_fit():
    actions = [json.loads(a) for a in draws(Env(Text()), {"tools": [TOOL]})]
    calls = [a["tool_calls"][0] for a in actions if a["tool_calls"]]
    assert 0 < len(calls) < len(actions)
    assert {c["name"] for c in calls} == {"find"}
    assert {c["arguments"]["count"] for c in calls} == {2, 3}
    assert {c["arguments"]["how"] for c in calls} == {"up", "down"}


@pytest.mark.parametrize("key", [0, 7])
def test_the_key_decides(key):
    assert drawn_action(Env(Text()), "a b c", {}, key) == drawn_action(
        Env(Text()), "a b c", {}, key
    )
    assert random_words(random.Random(key), "", None)
