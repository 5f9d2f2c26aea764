"""What rewards become on their way to the algorithm."""

from dataclasses import replace

import pytest

from rollart_algorithms.turns import turn_rewards
from rollart_core.config.training import Overlong, Shaping
from rollart_core.training.batch import RewardShaper, overlong_penalty
from rollart_core.types import Group
from rollart_testing import example_group

ENV = "unregistered/Env-v0"


def shaped(shaping, *groups, env=ENV) -> list[Group]:
    return RewardShaper.of({env: shaping}).shape(groups)


def rewards(group):
    return [t.reward for t in group.trajectories]


def test_an_overlong_answer_loses_reward_little_by_little():
    # From 100 - 40 = 60 tokens on, 1/40 of the penalty for each, and all of it from 100 on.
    overlong = Overlong(max_tokens=100, buffer_tokens=40, penalty=0.5)
    assert [overlong_penalty(n, overlong) for n in (0, 60, 70, 100, 999)] == [0, 0, 0.125, 0.5, 0.5]
    # 12 tokens of which 8 are sampled: 8 of 4..12 is half of the way.
    group = example_group([1.0, 0.0], num_tokens=12)
    (after,) = shaped(Shaping(overlong=Overlong(max_tokens=12, buffer_tokens=8)), group)
    assert rewards(after) == [0.5, -0.5]
    assert rewards(group) == [1.0, 0.0]  # the record stays


def test_running_normalisation_brings_rewards_to_one_size():
    shaper = RewardShaper.of({ENV: Shaping(normalise="running")})
    first, second = example_group([10.0, 30.0]), example_group([20.0, 60.0])
    # Of 10 and 30 the mean is 20 and the standard deviation 10.
    assert rewards(shaper.shape([first])[0]) == [-1.0, 1.0]
    # Of all four it is 30, and the deviation sqrt((400 + 0 + 100 + 900) / 4) = sqrt(350).
    assert rewards(shaper.shape([second])[0]) == pytest.approx([-10 / 350**0.5, 30 / 350**0.5])
    assert shaper.statistics.tolist() == [[4, 30, 1400]]
    (alike,) = RewardShaper.of({ENV: Shaping(normalise="running")}).shape([example_group([3, 3])])
    assert rewards(alike) == [0, 0]


def test_scale_comes_before_clip_and_other_environments_are_left_alone():
    group = example_group([1.0, 0.25])
    assert rewards(shaped(Shaping(scale=2, clip=(0, 1)), group)[0]) == [1.0, 0.5]
    assert shaped(Shaping(scale=2), group, env="another") == [group]


@pytest.mark.parametrize(
    "shaping",
    [
        Shaping(scale=3),
        Shaping(clip=(0, 0.5)),
        Shaping(normalise="running"),
        Shaping(overlong=Overlong(max_tokens=4, buffer_tokens=4), scale=2),
    ],
)
def test_the_rewards_of_turns_go_on_adding_up(shaping):
    (group,) = shaped(shaping, example_group([1.0, 0.0]))
    for trajectory in group.trajectories:
        assert turn_rewards(trajectory).sum() == pytest.approx(trajectory.reward)


def test_early_turns_are_scaled_and_the_last_bears_the_rest():
    group = example_group([1.0])
    (trajectory,) = group.trajectories
    turns = tuple(replace(t, reward=r) for t, r in zip(trajectory.turns, (0.25, 0.75), strict=True))
    group = replace(group, trajectories=(replace(trajectory, turns=turns),))
    # Twice 1 is 2, of which the clip leaves 1.5: 0.5 is the first turn's, and 1 what is left.
    (after,) = shaped(Shaping(scale=2, clip=(0, 1.5)), group)
    assert turn_rewards(after.trajectories[0]).tolist() == [0.5, 1.0]


def test_bad_sections_are_refused():
    with pytest.raises(ValueError, match="buffer_tokens"):
        Overlong(max_tokens=3, buffer_tokens=4)
    with pytest.raises(ValueError, match="must be below"):
        Shaping(clip=(1, 1))
    with pytest.raises(ValueError, match="has no effect"):
        Shaping()
