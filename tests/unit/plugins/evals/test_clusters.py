"""Intervals by clusters of tasks, such as goals of one product."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError
from rollart_core.runtime.report import score_gain
from rollart_core.runtime.run_envs import RunEnvs
from rollart_core.scheduling.evaluate import summarise
from rollart_core.store.estimates import (
    Z_95,
    Estimate,
    clustered_mean,
    clustered_share,
    t_95,
    wilson_interval,
)
from rollart_core.types import Task, Ticket, Trajectory
from rollart_envs.webshop.env import WebShopEnv
from rollart_evals.cells import cell_of
from rollart_evals.episodes import episode_of

if TYPE_CHECKING:
    from rollart_core.rollout.env_pool import EnvPool

MEANS = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0, "e": 1.0}
PRODUCTS = {"a": "shoe", "b": "shoe", "c": "lamp", "d": "lamp", "e": "sock"}
BY_TASK = {task: [mean] for task, mean in MEANS.items()}


def half(estimate: Estimate) -> float:
    return (estimate.high - estimate.low) / 2


def test_the_intervals_follow_the_formulas() -> None:
    # The deviations from 0.6 sum up to 0.8 (shoe), -1.2 (lamp) and 0.4 (sock).
    squares = 0.8**2 + 1.2**2 + 0.4**2
    ratio = 4.302653 / 2.776445  # Student's quantiles of 2 and 4 degrees of freedom
    variance = squares / 5**2 * (3 / 2)
    mean = clustered_mean(BY_TASK, PRODUCTS)
    assert (mean.mean, mean.n, mean.num_clusters) == (pytest.approx(0.6), 5, 3)
    assert half(mean) == pytest.approx(Z_95 * ratio * math.sqrt(variance), rel=1e-3)
    effective = 0.6 * 0.4 / (squares / 5**2) / (3 / 2) / ratio**2 * (5 / 4)
    share = clustered_share(BY_TASK, PRODUCTS)
    assert (share.low, share.high) == pytest.approx(wilson_interval(0.6, effective), rel=1e-3)
    assert (share.mean, share.n, share.num_clusters) == (pytest.approx(0.6), 5, 3)


def test_without_clusters_nothing_changes() -> None:
    for estimate in (clustered_mean, clustered_share):
        alone = estimate(BY_TASK)
        assert alone == estimate(BY_TASK, {})
        assert alone == estimate(BY_TASK, {task: task for task in MEANS})
        assert alone.num_clusters == 5


def test_tasks_that_only_repeat_their_cluster_say_little_more() -> None:
    once = clustered_share({i: [float(i < 10)] for i in range(40)})
    tasks = [(i, copy) for i in range(40) for copy in range(5)]
    by_task = {task: [float(task[0] < 10)] for task in tasks}
    repeated = clustered_share(by_task, {task: task[0] for task in tasks})
    assert half(repeated) == pytest.approx(half(once), rel=0.05)
    assert half(clustered_share(by_task)) < half(once) / 2


def test_if_all_succeed_each_cluster_counts_once() -> None:
    by_task = {i: [1.0] for i in range(300)}
    found = clustered_share(by_task, {i: i % 97 for i in range(300)})
    assert (found.low, found.high) == pytest.approx(wilson_interval(1.0, 97))


def test_one_cluster_says_nothing_of_others() -> None:
    alike = dict.fromkeys(MEANS, "shoe")
    share, mean = clustered_share(BY_TASK, alike), clustered_mean(BY_TASK, alike)
    assert (share.low, share.high, share.num_clusters) == (0.0, 1.0, 1)
    assert (mean.low, mean.high, mean.num_clusters) == (-math.inf, math.inf, 1)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    product = {i: rng.randrange(97) for i in range(300)}
    held: Counter[str] = Counter()
    for _ in range(300):
        chance = [0.65 if rng.random() < 0.5 else 0.99 for _ in range(97)]
        by_task = {i: [float(rng.random() < chance[p])] for i, p in product.items()}
        for name, clusters in (("product", product), ("task", None)):
            for estimate in (clustered_share, clustered_mean):
                found = estimate(by_task, clusters)
                held[f"{estimate.__name__} by {name}"] += found.low <= 0.82 <= found.high
    shares = {name: count / 300 for name, count in held.items()}
    assert shares["clustered_share by product"] > 0.92
    assert shares["clustered_mean by product"] > 0.92
    assert shares["clustered_share by task"] < 0.9
    assert shares["clustered_mean by task"] < 0.9


@pytest.mark.parametrize(
    ("df", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (96, 1.98498)],
)
def test_students_quantile_is_that_of_the_tables(df: int, quantile: float) -> None:
    assert t_95(df) == pytest.approx(quantile, abs=0.004)


def played(number: int, *, score: float) -> Trajectory:
    task = Task("shop", "test", number, seed=number)
    ticket = Ticket(f"t{number}", task, f"g{number}", 0)
    return Trajectory(ticket, "finished", reward=score, score=score, success=score == 1.0)


def product_of(task: Task) -> str | None:
    return f"product {task.index // 3}"


def test_an_evaluation_and_its_gain_are_clustered() -> None:
    before = summarise([played(i, score=0.0) for i in range(12)], product_of)
    trained = [played(i, score=float(i < 6)) for i in range(12)]
    after = summarise(trained, product_of)
    assert (after.success.n, after.success.num_clusters, after.score.num_clusters) == (12, 4, 4)
    assert half(after.success) > half(summarise(trained).success)
    gain, by_task = (score_gain((b, a)) for b, a in ((before, after), (before, summarise(trained))))
    assert gain
    assert gain["num_clusters"] == 4
    assert gain["low"] < by_task["low"] < by_task["mean"] == gain["mean"]


def test_the_clusters_of_two_environments_are_apart() -> None:
    trajectories = [played(i, score=1.0) for i in range(3)]
    other = [Trajectory(Ticket("o", Task("other", "test", 0, 0), "o", 0), "finished", score=1.0)]
    assert summarise([*trajectories, *other], lambda task: "one").score.num_clusters == 2


def test_the_cells_of_an_evaluation_are_clustered() -> None:
    episodes = [episode_of("model", played(i, score=float(i < 6))) for i in range(12)]
    clusters = {("shop", "test", i): i // 3 for i in range(12)}
    cell = cell_of("shop", "model", episodes, 1, says_success=True, clusters=clusters)
    estimates = (cell.success, cell.score, cell.pass_at[1])
    assert [e.num_clusters for e in estimates if e] == [4, 4, 4]


class Workers:
    """Answers for an environment of five tasks a split."""

    def __init__(self, names: list[str] | None) -> None:
        self.names = names

    async def call(self, method: str, env: object, split: str) -> object:
        return 5 if method == "num_tasks" else self.names


def run_envs(config: Path, names: list[str] | None) -> RunEnvs:
    envs = RunEnvs(resolve_run(load_config(config), import_classes=False))
    asyncio.run(envs.count_tasks(cast("EnvPool", Workers(names))))
    return envs


def test_a_run_asks_its_environments_for_clusters(repo_root: Path) -> None:
    hello, task = repo_root / "examples/hello.yaml", Task("toy/FrozenLake-v1", "test", 3, 0)
    assert run_envs(hello, ["a", "a", "b", "b", "c"]).cluster_of(task) == "b"
    assert run_envs(hello, None).cluster_of(task) is None
    with pytest.raises(ConfigError, match=r"task_clusters\('train'\) returns 2 names.* is 5"):
        run_envs(hello, ["a", "b"])


def test_the_clusters_of_webshop_are_its_products() -> None:
    shop = WebShopEnv(num_products=28)
    products = {split: shop.task_clusters(split) for split in ("train", "test")}
    assert [len(names) for names in products.values()] == [shop.num_tasks(s) for s in products]
    assert not set(products["train"]) & set(products["test"])
    assert len(set(products["test"])) == 5
    shop.reset(options={"split": "test", "task": 2})
    assert shop.goal.asin == products["test"][2]


@pytest.mark.parametrize("n", [3, 21.7, 86.0, 127.3, 167.0, 1200.0])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_share_is_inside_its_own_interval(p, n):
    low, high = wilson_interval(p, n)
    assert low <= p <= high
