"""An episode turn by turn, as algorithms that give credit to turns read it."""

from dataclasses import replace

import numpy as np
import pytest

from rollart_algorithms.turns import (
    anchors,
    spread_over_turns,
    turn_returns,
    turn_rewards,
    turn_spans,
)
from rollart_testing import example_group


def test_an_episode_can_be_read_turn_by_turn():
    trajectory = example_group([1.0]).trajectories[0]
    (sample,) = trajectory.samples
    assert [(s.turn, s.start, s.stop) for s in turn_spans(sample)] == [(0, 1, 3), (1, 4, 6)]
    assert turn_rewards(trajectory).tolist() == [0, 1]
    # G_1 = 1, G_0 = 0 + 0.5 x 1.
    assert turn_returns(np.array([0, 1], np.float32), 0.5).tolist() == [0.5, 1]
    assert spread_over_turns(sample, [3, 4]).tolist() == [0, 3, 3, 0, 4, 4]


def test_equal_states_have_equal_anchors():
    first, second = (anchors(t) for t in example_group([1.0, 0.0]).trajectories)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_reward_function_speaks_of_the_last_turn():
    trajectory = replace(example_group([1.0]).trajectories[0], reward=0.3)
    assert turn_rewards(trajectory).tolist() == pytest.approx([0, 0.3])
