"""The official 1,000 products: every recorded trace of the original code, replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rollart_envs.webshop import WebShopEnv
from rollart_envs.webshop.goals import Goal
from rollart_envs.webshop.session import judge

EPISODES = ("text_synth", "rich_html", "human")
PARTS = ("r_type", "r_att", "w_att", "query_match", "category_match", "r_price", "w_price")


@pytest.fixture(scope="module")
def data_dir(shared_dir: Path) -> Path:
    return shared_dir / "data" / "webshop"


@pytest.fixture(scope="module")
def golden(shared_dir: Path) -> Path:
    return shared_dir / "golden" / "webshop"


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"webshop_{name}.json").read_text(encoding="utf-8"))


def as_upstream(goal: Goal) -> dict[str, Any]:
    plain = asdict(goal)
    options = goal.goal_options
    plain["attributes"] = list(goal.attributes)
    plain["goal_options"] = dict(options) if isinstance(options, Mapping) else list(options)
    return plain


def test_goals_and_ranged_prices_are_upstreams(data_dir, golden):
    shop = WebShopEnv(data_dir=data_dir).shop
    head = read(golden, "goals_synth_seed0.head")
    assert len(shop.goals) == head["n"] == 6910
    assert [as_upstream(g) for g in shop.goals[:50]] == head["first50"]
    ranged = {p.asin: shop.prices[p.asin] for p in shop.products if len(p.pricing) > 1}
    assert ranged == head["ranged_product_prices"]
    assert len({g.asin for g in shop.goals}) == 415


def test_another_seed_draws_other_prices(data_dir):
    shops = [WebShopEnv(data_dir=data_dir, seed=seed, num_products=100).shop for seed in (0, 1)]
    assert shops[0].prices != shops[1].prices


@pytest.mark.parametrize("name", EPISODES)
def test_episodes_replay(name, data_dir, golden):
    goals = "human" if name == "human" else "synthetic"
    compared = 0
    for episode in read(golden, f"episodes_{name}_seed0")["episodes"]:
        env = WebShopEnv(
            data_dir=data_dir, observation_mode=episode["observation_mode"], goals=goals
        )
        observation, info = env.reset(options={"goal": episode["goal_index"]})
        assert as_upstream(env.goal) == episode["goal"]
        assert observation == episode["initial_observation"]
        assert offered(info) == episode["initial_available_actions"]
        compared += sum(1 for _ in replay(env, episode))
    assert compared >= {"text_synth": 100, "rich_html": 40, "human": 9}[name]


def replay(env: WebShopEnv, episode: dict[str, Any]) -> Iterator[None]:
    for step in episode["steps"]:
        observation, reward, terminated, _, info = env.step(step["action"])
        assert terminated == step["done"]
        assert offered(info) == step["available_actions"]
        assert env.session.url == step["url"]
        # Where the score hangs on the noun tagger, neither it nor the page that prints it is fixed.
        if not terminated or episode["pos_tagger_invariant"]:
            assert observation == step["observation"], step["action"]
            assert reward == step["reward"]
        yield


def offered(info: dict[str, Any]) -> dict[str, Any]:
    return {key: info[key] for key in ("has_search_bar", "clickables")}


def test_rewards_are_upstreams(data_dir, golden):
    shop = WebShopEnv(data_dir=data_dir).shop
    compared = 0
    for case in read(golden, "reward_units")["cases"]:
        if not case["pos_tagger_invariant"]:
            continue
        goal = Goal(**{**case["goal"], "attributes": tuple(case["goal"]["attributes"])})
        product = shop.by_asin[case["asin"]]
        outcome = judge(product, goal, case["price"], case["options"], shop.nouns)
        assert outcome.reward == pytest.approx(case["reward"], abs=1e-12)
        for part in PARTS:
            assert getattr(outcome, part) == pytest.approx(case["info"][part]), part
        assert outcome.r_option == case["info"].get("r_option")
        compared += 1
    assert compared == 130


def test_the_ranking_is_lucenes(data_dir, golden):
    shop = WebShopEnv(data_dir=data_dir).shop
    cases = read(golden, "search_lucene_1k")
    equal = 0
    for case in cases:
        ours = [shop.products[i].asin for i in shop.index.search(case["query"])]
        equal += ours[:10] == [asin for asin, _ in case["hits"][:10]]
    assert equal >= 0.99 * len(cases)


def test_the_expert_reaches_what_can_be_reached(data_dir):
    """One goal in 15 cannot be met in full: the fuzzy matcher fails its own options."""
    env = WebShopEnv(data_dir=data_dir)
    reachable = reached = 0
    for index in range(0, len(env.shop.goals), 29):
        env.reset(options={"goal": index})
        goal = env.goal
        product, price = env.shop.by_asin[goal.asin], env.shop.prices[goal.asin]
        best = judge(product, goal, price, dict(goal.goal_options), env.shop.nouns)
        reachable += best.success
        for _ in range(15):
            _, reward, terminated, _, _ = env.step(env.oracle())
            if terminated:
                reached += reward == 1
                break
    assert reachable > 0.9 * len(range(0, len(env.shop.goals), 29))
    assert reached >= 0.98 * reachable
