"""Several environments give their tasks in proportion, in one seeded order that can be resumed."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from rollart_core.scheduling.task_mix import TaskMix, WeightedSource, interleaved, shares, turns
from rollart_core.scheduling.tasks import TaskSource, held_out_tasks
from rollart_core.types import Task


def mix(weights: dict[str, float], seed: int = 0) -> TaskMix:
    sources = [WeightedSource(TaskSource(n, "train", 50, seed), w) for n, w in weights.items()]
    return TaskMix(sources, seed)


def take(source: TaskMix, n: int) -> list[Task]:
    return [source.next() for _ in range(n)]


@pytest.mark.parametrize("weights", [[1, 1], [2, 1], [5, 3, 1], [0.1, 0.7, 0.2], [1, 1000]])
@pytest.mark.parametrize("seed", [0, 7])
def test_every_beginning_holds_the_shares(weights: list[float], seed: int) -> None:
    given = Counter()
    for n, who in enumerate(islice(turns(weights, seed), 2000), start=1):
        given[who] += 1
        for i, weight in enumerate(weights):
            assert abs(given[i] - n * weight / sum(weights)) < len(weights)


def test_each_environment_goes_through_its_own_order() -> None:
    alone = TaskSource("a", "train", 50, 0)
    mixed = [t for t in take(mix({"a": 2, "b": 1}), 300) if t.env_id == "a"]
    assert len(mixed) == 200
    assert mixed == [alone.next() for _ in mixed]


def test_the_order_hangs_on_the_seed_alone() -> None:
    names = [[t.env_id for t in take(mix({"a": 3, "b": 2}, seed), 60)] for seed in (0, 0, 1)]
    assert names[0] == names[1]
    assert names[0] != names[2]


def test_it_goes_on_where_a_checkpoint_stood() -> None:
    source = mix({"a": 3, "b": 2, "c": 0.5})
    tasks = take(source, 137)
    source.requeue(tasks[9])
    other = mix({"a": 3, "b": 2, "c": 0.5})
    other.restore(source.state())
    assert take(other, 100) == take(source, 100)
    assert tasks[9] == take(mix({"a": 3, "b": 2, "c": 0.5}), 10)[9]


def test_shares_add_up_and_leave_nobody_out() -> None:
    assert shares([2, 1], 9) == [6, 3]
    assert shares([1], 7) == [7]
    assert shares([1, 1000], 10) == [1, 9]
    assert shares([1, 1, 1], 3) == [1, 1, 1]
    assert all(sum(shares([5, 3, 1, 0.01], n)) == n for n in range(4, 200))
    with pytest.raises(ValueError, match="1 cannot be divided among 2"):
        shares([1, 1], 1)


def test_held_out_lists_are_mixed_evenly() -> None:
    lists = [held_out_tasks(name, "test", n, 0) for name, n in (("a", 20), ("b", 10), ("c", 0))]
    mixed = interleaved(lists, 0)
    assert sorted(mixed, key=str) == sorted((t for tasks in lists for t in tasks), key=str)
    assert 4 <= sum(t.env_id == "b" for t in mixed[:15]) <= 6
