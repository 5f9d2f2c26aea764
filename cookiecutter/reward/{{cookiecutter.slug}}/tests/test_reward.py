"""Check that the reward satisfies RollArt's contract and returns the expected values."""

from dataclasses import replace

import pytest
from rollart_testing import assert_checks, check_reward, example_request

from {{ cookiecutter.module }}.plugin import rollart_rewards
from {{ cookiecutter.module }}.reward import {{ cookiecutter.class_name }}


def test_the_reward_keeps_the_contract() -> None:
    (spec,) = rollart_rewards()
    assert_checks(check_reward({{ cookiecutter.class_name }}(), reward_range=spec.reward_range))


@pytest.mark.parametrize(
    ("env_return", "num_turns", "value"),
    [(1.0, 0, 1.0), (1.0, 3, 0.7), (0.0, 3, 0.0), (1.0, 99, 0.0)],
)
def test_turns_cost(env_return: float, num_turns: int, value: float) -> None:
    request = replace(example_request(env_return), num_turns=num_turns)
    result = {{ cookiecutter.class_name }}(turn_cost=0.1).score(request)
    assert result.value == pytest.approx(value)
