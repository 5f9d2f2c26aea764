"""Check that the reward satisfies RollArt's contract and returns the expected values."""

from dataclasses import replace

import pytest
from rollart_testing import assert_checks, check_reward, example_request

from {{ cookiecutter.module }}.plugin import rollart_rewards
from {{ cookiecutter.module }}.reward import {{ cookiecutter.base }}Reward


def test_the_reward_keeps_the_contract() -> None:
    (spec,) = rollart_rewards()
    assert_checks(check_reward({{ cookiecutter.base }}Reward(), reward_range=spec.reward_range))


@pytest.mark.parametrize(("detours", "value"), [(0, 1.0), (2, 0.8), (20, 0.0)])
def test_detours_cost(detours: int, value: float) -> None:
    request = replace(example_request(1.0), components={"detours": detours})
    result = {{ cookiecutter.base }}Reward(detour_cost=0.1).score(request)
    assert result.value == pytest.approx(value)
