"""Gymnasium's environments as text."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import rollart_core
from rollart_core.errors import PluginError, UnknownIdError
from rollart_core.plugins import registry
from rollart_plugins.adapters.sessions import gym

DRY = {"make": {"is_slippery": False}}


def make(env_id: str, **options: object) -> Any:
    return rollart_core.make(f"gymnasium::{env_id}", **options)


def play(env: Any, task: int = 0) -> float:
    env.reset(options={"task": task})
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(env.oracle())
        total, over = total + reward, terminated or truncated
    return total


def test_a_lake_is_drawn_with_the_player_in_brackets() -> None:
    env = make("FrozenLake-v1", prompt="", **DRY)
    page, info = env.reset(options={"task": 0})
    assert page == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert info["available_actions"] == ["left", "down", "right", "up"]
    assert env.step(" Down ")[0].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert env.step("no, wait: <answer>up</answer>")[0].splitlines()[1].startswith("[S]")
    assert env.step("1")[0].splitlines()[2].startswith("[F]")  # numbers are understood too
    env.close()


def test_what_is_no_action_is_told_costs_and_takes_a_turn() -> None:
    env = make("CliffWalking-v1", max_turns=2)
    env.reset(options={"task": 0})
    page, reward, terminated, truncated, info = env.step("jump")
    assert page.startswith("That is no action. Answer with one of: up, right, down, left.")
    assert (reward, terminated, truncated) == (-100.0, False, False)
    assert info["invalid_action"]
    assert env.step("7")[1:4] == (-100.0, False, True)
    env.close()
    mild = make("CliffWalking-v1", invalid_penalty=0.5)
    mild.reset(seed=0)
    assert mild.step("")[1] == -0.5
    mild.close()


@pytest.mark.parametrize(
    ("env_id", "options", "reward_range", "max_turns"),
    [
        ("CliffWalking-v1", {}, (-10_000.0, -13.0), 100),
        ("FrozenLake-v1", {}, (0.0, 1.0), 100),
        ("FrozenLake-v1", {"max_turns": 5, **DRY}, (0.0, 0.0), 5),  # six steps to the goal
        ("CartPole-v1", {}, (-500.0, 500.0), 500),
        ("CliffWalking-v1", {"reward": "relative"}, (0.0, 1.0), 100),
        ("Acrobot-v1", {}, (float("-inf"), float("inf")), 500),
    ],
)
def test_the_reward_range_is_computed_where_it_can_be(
    env_id: str, options: dict[str, Any], reward_range: tuple[float, float], max_turns: int
) -> None:
    spec = registry.env_spec(f"gymnasium::{env_id}", options)
    assert (spec.reward_range, spec.max_turns) == (reward_range, max_turns)


def test_the_oracle_takes_the_best_way_of_a_table_without_chance() -> None:
    for env_id, options, best in (
        ("CliffWalking-v1", {}, -13.0),
        ("FrozenLake-v1", DRY, 1.0),
        ("CliffWalking-v1", {"reward": "relative", "max_turns": 20}, 1.0),
    ):
        env = make(env_id, **options)
        assert play(env) == best
        env.close()
    slippery = make("FrozenLake-v1")
    assert not hasattr(slippery, "oracle")
    slippery.close()


def test_relative_returns_are_shares_of_what_could_be_won() -> None:
    env = make("CliffWalking-v1", reward="relative", max_turns=40)
    env.reset(options={"task": 0})
    actions = ["up", "up", *["right"] * 11, "down", "down"]
    rewards = [env.step(action)[1:3] for action in actions]
    assert rewards[:-1] == [(0.0, False)] * (len(actions) - 1)
    assert rewards[-1] == (pytest.approx((-15 + 40) / (-13 + 40)), True)
    env.reset(options={"task": 0})
    over = [env.step("up") for _ in range(40)][-1]
    assert over[1:4] == (0.0, False, True)
    assert over[4]["success"] is False
    env.close()


def test_a_seed_plays_as_in_gymnasium_itself() -> None:
    ours, theirs = make("Blackjack-v1"), gymnasium.make("Blackjack-v1")
    for task in range(20):
        ours.reset(options={"task": task})
        theirs.reset(seed=task)
        for name, number in (("hit", 1), ("stick", 0)):
            got, expected = ours.step(name), theirs.step(number)
            assert got[1:4] == expected[1:4]
            if got[2]:
                break
    ours.close()
    theirs.close()


def test_observations_as_text() -> None:
    assert gym.text_of({"a": np.array([0.123456, 2]), "b": (np.int64(3), "c")}) == (
        "a: [0.1235, 2]\nb: 3, c"
    )
    assert gym.text_of(np.eye(2, dtype=int)) == "[[1, 0],\n[0, 1]]"
    assert gym.uncoloured("\x1b[43ma\x1b[0m \x1b[34;1mb\x1b[0m\n") == "[a] b"
    env = make("CartPole-v1", prompt="{observation}!")
    assert env.reset(options={"task": 0})[0].startswith("[0.0")
    env.close()


@pytest.mark.parametrize(
    ("env_id", "options", "error", "words"),
    [
        ("FrozenLak-v1", {}, UnknownIdError, "Did you mean: `FrozenLake`"),
        ("Pendulum-v1", {}, PluginError, "only Discrete and Text"),
        ("FrozenLake-v1", {"make": {"slippy": 1}}, PluginError, "slippy"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, PluginError, "2 names were given for 4 actions"),
        ("FrozenLake-v1", {"reward": "relative"}, PluginError, "deterministic transition table"),
        ("CartPole-v1", {"observation": "ansi"}, PluginError, "has no text rendering"),
    ],
)
def test_what_does_not_fit_is_told(
    env_id: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(env_id, **options)
