"""A visit to the shop by its expert, for tests of WebShop."""

from __future__ import annotations

import itertools

from rollart_envs.webshop import WebShopEnv

SMALL = {
    "observation_mode": "terse",
    "page_handles": True,
    "results_per_page": 3,
    "instruction": "first_page",
}


def buy_like_an_expert(env: WebShopEnv, max_turns: int = 15) -> tuple[float, int, dict]:
    for turn in itertools.count(1):
        _, reward, terminated, truncated, info = env.step(env.oracle())
        assert not truncated
        assert not info["invalid_action"]
        if terminated:
            return reward, turn, info
        assert reward == 0
        assert turn < max_turns
    raise AssertionError
