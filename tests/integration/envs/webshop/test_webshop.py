"""The shop on the generated catalogue: pages, actions, rewards, splits, bad input."""

from __future__ import annotations

import re
import threading

import pytest
from gymnasium.error import ResetNeeded
from support.webshop_expert import SMALL, buy_like_an_expert

from rollart_core.scheduling.tasks import hold_out
from rollart_envs.webshop import WebShopEnv
from rollart_envs.webshop.config import WebShopConfig
from rollart_envs.webshop.generate import ATTRIBUTES, BRANDS, FINISHES, HOWS, KINDS, generate
from rollart_envs.webshop.nouns import RuleNouns, make_nouns
from rollart_envs.webshop.session import judge, parse_action


def test_a_small_episode_reads_as_documented():
    env = WebShopEnv(**SMALL)
    observation, info = env.reset(options={"task": 0, "split": "test"})
    goal = env.goal
    (first, one), (second, two) = goal.goal_options.items()
    instruction, button = observation.split("\n")
    assert instruction.startswith("Find me ")
    assert f"with {first}: [{one}], and {second}: [{two}], and price lower than" in instruction
    assert button == "[search]"
    assert info["has_search_bar"]
    query = env.oracle()
    assert query == f"search[{goal.attributes[0]} {goal.query}]"
    results = env.step(query)[0].split("\n")
    assert results[0].startswith("[item 1] ")
    assert len(results) == 4
    assert results[-1] == "[next >]"
    item, _, _, _, info = env.step("click[item 1]")
    assert f" [{one}]" in item
    assert f"click[{one}]" in info["available_actions"]
    assert env.step(f"click[{one}]")[0] == f"{first}: {one}"
    assert env.step(f"click[{two}]")[0] == f"{first}: {one}\n{second}: {two}"
    observation, reward, terminated, _, info = env.step("click[buy now]")
    assert (observation, reward, terminated) == ("score 1.00", 1.0, True)
    assert info["reward_components"]["r_option"] == 1
    assert all(isinstance(v, float) for v in info["reward_components"].values())
    assert info["noun_tagger"]


def test_the_first_result_is_the_right_one_at_difficulty_1_and_seldom_at_2():
    def share_first(difficulty: int) -> float:
        env = WebShopEnv(**SMALL, difficulty=difficulty, num_products=84)
        tasks = range(0, env.num_tasks("train"), 9)
        hits = 0
        for task in tasks:
            env.reset(options={"task": task, "split": "train"})
            env.step(env.oracle())
            hits += env.oracle() == "click[item 1]"
        return hits / len(tasks)

    assert share_first(1) > 0.95
    assert 0.15 < share_first(2) < 0.55


def test_splits_share_no_product_and_cover_all_goals():
    env = WebShopEnv()
    by_split = {
        split: {env.shop.goals[i].asin for i in env.shop.splits[split]}
        for split in ("train", "warm", "test")
    }
    assert {k: len(v) for k, v in by_split.items()} == {"train": 400, "warm": 60, "test": 100}
    assert not by_split["train"] & by_split["test"]
    assert not by_split["warm"] & (by_split["train"] | by_split["test"])
    assert sum(env.num_tasks(s) for s in by_split) == len(env.shop.goals)


def test_validation_holds_out_whole_products_and_plays_goals_of_all_of_them():
    env = WebShopEnv(**SMALL)
    products = env.task_clusters("train")
    found = hold_out("webshop/WebShop-v1", "train", len(products), 64, products)
    assert found.num_held == 64
    assert found.num_kept is not None
    held = {products[found.held(i)] for i in range(64)}
    assert len(held) == 40
    assert held.isdisjoint(products[found.kept(i)] for i in range(found.num_kept))


def test_words_of_test_products_are_known_and_their_pairs_are_new():
    env = WebShopEnv()
    pairs = {
        split: {
            (g.attributes, g.query) for g in (env.shop.goals[i] for i in env.shop.splits[split])
        }
        for split in ("train", "test")
    }
    assert not pairs["train"] & pairs["test"]
    known = {word for (words, noun) in pairs["train"] for word in (*words, noun)}
    assert {word for (words, noun) in pairs["test"] for word in (*words, noun)} <= known


def test_no_word_is_in_two_lists():
    values = {value for kind in KINDS for _, group in kind.options for value in group}
    nouns = [noun for kind in KINDS for noun in kind.nouns]
    everything = [*BRANDS, *ATTRIBUTES, *nouns, *HOWS, *FINISHES, *values]
    assert len(everything) == len(set(everything))


def test_the_catalogue_is_the_same_for_the_same_seed_only():
    assert generate(20, 1, 7) == generate(20, 1, 7)
    assert generate(20, 1, 7) != generate(20, 1, 8)


def test_a_price_above_the_limit_costs_reward():
    env = WebShopEnv()
    env.reset(options={"goal": 0})
    product = env.shop.by_asin[env.goal.asin]
    options = dict(env.goal.goal_options)
    dear = judge(product, env.goal, env.goal.price_upper + 1, options, env.shop.nouns)
    assert dear.reward == pytest.approx(0.75)
    assert not dear.r_price


def test_an_invalid_action_changes_nothing_and_says_so():
    env = WebShopEnv()
    before, info = env.reset(options={"goal": 3})
    actions = ("", "buy", "click[buy now]", "click[search]", "search[]", "search", "[", "]", "[x]")
    for action in actions:
        observation, reward, terminated, truncated, after = env.step(action)
        assert observation == before, action
        assert (reward, terminated, truncated) == (0, False, False)
        assert after["invalid_action"]
        assert after["clickables"] == info["clickables"]
    assert not env.step("search[boots]")[-1]["invalid_action"]


def test_prev_from_an_item_forgets_the_options_and_from_a_sub_page_does_not():
    env = WebShopEnv()
    env.reset(options={"goal": 5})
    env.step(env.oracle())
    env.step(env.oracle())
    name, value = next(iter(env.goal.goal_options.items()))
    env.step(f"click[{value}]")
    env.step("click[description]")
    env.step("click[< prev]")
    assert env.session.options == {name: value}
    page = env.step("click[< prev]")[0]
    assert env.session.options == {}
    assert "Page 1 (Total results: " in page


def test_search_works_on_every_page_and_next_is_always_there():
    env = WebShopEnv()
    env.reset(options={"goal": 5})
    env.step("search[boots]")
    for _ in range(8):
        env.step("click[next >]")
    assert env.session.shown == ()
    assert env.session.clickables.keys() == {"back to search", "< prev", "next >"}
    assert "Page 1 " in env.step("search[lamp]")[0]
    env.step(f"click[{env.session.shown[0].asin.lower()}]")
    assert "Page 1 " in env.step("search[table]")[0]


def test_goals_are_drawn_by_seed_and_tasks_are_not():
    env = WebShopEnv(**SMALL)
    assert env.reset(seed=5)[0] == env.reset(seed=5)[0]
    assert len({env.reset(seed=s)[0] for s in range(8)}) > 1
    task = {"task": 2, "split": "test"}
    assert env.reset(seed=1, options=task)[0] == env.reset(seed=2, options=task)[0]
    index = env.reset(seed=3, options={"split": "warm"})[1]["goal"]
    assert index in env.shop.splits["warm"]


def test_reset_options_are_checked():
    env = WebShopEnv()
    for options, message in [
        ({"task": 0, "split": "dev"}, "no split 'dev'"),
        ({"task": 10**6}, "task: 1000000 is not an index"),
        ({"task": -1}, "task: -1 is not an index"),
        ({"goal": "3"}, "goal: '3' is not an index"),
        ({"tsak": 1}, "unknown reset option 'tsak'"),
    ]:
        with pytest.raises(ValueError, match=message):
            env.reset(options=options)


def test_steps_outside_an_episode_are_refused():
    env = WebShopEnv()
    with pytest.raises(ResetNeeded, match=r"call reset\(\)"):
        env.step("search[x]")
    env.reset(options={"goal": 0})
    buy_like_an_expert(env)
    assert env.oracle() is None
    with pytest.raises(ResetNeeded, match="ended with a purchase"):
        env.step("search[x]")
    env.reset()
    with pytest.raises(TypeError, match="an action is a str"):
        env.step(3)
    env.close()
    env.close()


@pytest.mark.parametrize("mode", ["text", "text_rich", "html", "terse"])
def test_a_megabyte_is_survived(mode):
    env = WebShopEnv(observation_mode=mode)
    env.reset(options={"goal": 1})
    million = 1_000_000
    for action in (
        "search[" + "word " * (million // 5) + "]",
        "click[" + "x" * million + "]",
        "search[" * (million // 7),
        "[" * million,
        "search[" + "\ud800é" * 100 + "]",
    ):
        assert len(env.step(action)[0]) < million


def test_what_is_shown_once_is_shown_on_the_first_page_only():
    env = WebShopEnv(instruction="first_page")
    observation, _ = env.reset(options={"goal": 0})
    assert env.goal.instruction_text in observation
    assert "Instruction" not in env.step("search[boots]")[0]
    assert "Instruction" not in env.step("click[back to search]")[0]


def test_free_words_are_goals_too():
    env = WebShopEnv(goals="human", num_products=40)
    env.reset(options={"task": 0, "split": "test"})
    assert not env.goal.instruction_text.startswith("Find me")
    assert buy_like_an_expert(env)[0] == 1


def test_equal_configs_share_one_shop_across_threads():
    shops = []
    threads = [
        threading.Thread(target=lambda: shops.append(WebShopEnv(num_products=40, seed=11).shop))
        for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({id(s) for s in shops}) == 1
    assert WebShopEnv(num_products=41, seed=11).shop is not shops[0]


def test_the_corpus_holds_pages_and_actions_of_train_goals_only():
    env = WebShopEnv(**SMALL, num_products=12)
    texts = list(env.corpus())
    assert any(t.startswith("search[") for t in texts)
    assert "click[buy now]" in texts
    held_out = {
        f"{env.shop.goals[i].attributes[0]} {env.shop.goals[i].query}"
        for i in env.shop.splits["test"]
    }
    assert not {t for t in texts if t.startswith("search[") and t[7:-1] in held_out}


def test_options_without_effect_or_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="difficulty needs the generated catalogue"):
        WebShopConfig(data_dir=tmp_path, difficulty=2)
    with pytest.raises(ValueError, match="data_dir: no such folder"):
        WebShopEnv(data_dir=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no items_shuffle_1000"):
        WebShopEnv(data_dir=tmp_path)
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins_1000.json"):
        (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=r"cannot read items_shuffle_1000\.json"):
        WebShopEnv(data_dir=tmp_path)
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins_1000.json"):
        (tmp_path / name).write_text('[{"asin": "B0"}]' if "shuffle" in name else "{}")
    with pytest.raises(ValueError, match="a product has the wrong format"):
        WebShopEnv(data_dir=tmp_path)
    with pytest.raises(ValueError, match="at most 1536, not 1000000; use a smaller"):
        WebShopConfig(num_products=10**6)  # when the config loads, before anything is made
    assert WebShopConfig(num_products=10**6, data_dir=tmp_path).num_products == 10**6


def test_the_noun_tagger_asked_for_is_the_one_that_speaks():
    assert make_nouns("builtin").name == "builtin"
    assert make_nouns("auto").name in ("builtin", "spacy:en_core_web_sm")
    assert RuleNouns()("The Waterproof Men's Boots, 2 Pairs") == (
        "waterproof", "men", "boots", "pairs",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("action", "parsed"),
    [
        ("search[soft boots]", ("search", "soft boots")),
        ("click[a] then click[b]", ("click[a] then click", "b")),
        ("click[28[x]", ("click[28", "x")),
        ("search[a]]", ("search", "a]")),
        ("search[]", ("search[]", None)),
        ("search[[]", ("search", "[")),
        ("[x]", ("[x]", None)),
        ("search[a\nb]", ("search[a\nb]", None)),
        ("search", ("search", None)),
    ],
)
def test_actions_are_parsed_as_upstream_does(action, parsed):
    """The middle column is what ``re.match(r"(.+)\\[(.+)\\]", action)`` gives."""
    match = re.match(r"(.+)\[(.+)\]", action)
    assert parsed == (match.groups() if match else (action, None))
    assert parse_action(action) == parsed
