"""Levels by the hundred: solved by the oracle in time, and no split shares one with another."""

from itertools import product

import pytest

from rollart_envs.toy.frozen_lake import FrozenLakeEnv
from rollart_envs.toy.grid import SPLITS
from rollart_envs.toy.sokoban import SokobanEnv, solve

BOTH = pytest.mark.parametrize("make", [FrozenLakeEnv, SokobanEnv])


def play_oracle(env):
    done, num_turns = False, 0
    while not done:
        _, reward, terminated, truncated, info = env.step(env.oracle())
        done, num_turns = terminated or truncated, num_turns + 1
    return reward, info["success"], num_turns


@pytest.mark.parametrize(
    "env",
    [
        FrozenLakeEnv(),
        FrozenLakeEnv(size=8, hole_probability=0.3),
        SokobanEnv(),
        SokobanEnv(size=5, num_boxes=2, num_pulls=8, wall_probability=0.15),
    ],
)
def test_oracle_solves_every_task_in_time(env):
    for split, index in product(SPLITS, range(8)):
        env.reset(options={"split": split, "task": index})
        reward, success, num_turns = play_oracle(env)
        assert (reward, success) == (1.0, True)
        assert num_turns <= env.max_turns
        assert env.oracle() is None


@BOTH
def test_splits_share_no_level(make):
    env = make(size=4)
    levels = {split: {env.level(split, i) for i in range(100)} for split in SPLITS}
    assert all(len(found) > 3 for found in levels.values())
    assert not levels["train"] & levels["test"]
    assert not levels["train"] & levels["warm"]
    assert not levels["warm"] & levels["test"]


def test_sokoban_levels_fit_into_a_tight_limit():
    env = SokobanEnv(size=5, num_boxes=2, num_pulls=6, max_turns=16)
    for index in range(15):
        env.reset(options={"task": index})
        assert len(solve(env._floor, env._targets, env._state)) <= 16
