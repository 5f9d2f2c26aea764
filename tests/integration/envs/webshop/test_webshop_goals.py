"""The expert reaches, and only the right options earn, the whole reward: hundreds of goals."""

from __future__ import annotations

import random

import pytest
from support.webshop_expert import SMALL, buy_like_an_expert

from rollart_envs.webshop import WebShopEnv
from rollart_envs.webshop.generate import generate
from rollart_envs.webshop.goals import synthetic_goals
from rollart_envs.webshop.nouns import RuleNouns
from rollart_envs.webshop.products import load_products
from rollart_envs.webshop.session import judge


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_the_expert_succeeds_in_as_few_turns_as_there_are_clicks(difficulty):
    env = WebShopEnv(**SMALL, difficulty=difficulty, num_products=None if difficulty == 1 else 84)
    for split in ("train", "warm", "test"):
        for task in range(0, env.num_tasks(split), 97):
            env.reset(options={"task": task, "split": split})
            reward, turns, info = buy_like_an_expert(env)
            assert reward == 1
            assert info["success"] is True
            assert turns == (5 if difficulty < 3 else 6)


@pytest.mark.parametrize("difficulty", [1, 3])
def test_every_wrong_option_costs_reward(difficulty):
    """Upstream's matcher is fuzzy; the catalogue offers no value that it takes for another."""
    rows, attributes, human = generate(40, difficulty)
    products = load_products(rows, attributes, human)
    prices = {p.asin: 1.0 for p in products}
    by_asin = {p.asin: p for p in products}
    nouns = RuleNouns()
    for goal in synthetic_goals(products, prices, random.Random(0))[::37]:
        product = by_asin[goal.asin]
        right = dict(goal.goal_options)
        assert judge(product, goal, 1.0, right, nouns).success
        for name, values in product.options.items():
            for value in set(values) - {right[name]}:
                outcome = judge(product, goal, 1.0, {**right, name: value}, nouns)
                assert outcome.reward < 1, (value, goal.goal_options)
