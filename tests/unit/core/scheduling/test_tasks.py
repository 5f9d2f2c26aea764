"""Tasks come in a seeded order without end, and a resumed source goes on where it stood."""

import pytest

from rollart_core.scheduling.tasks import TaskSource, held_out_tasks, task_seed
from rollart_core.types import Task


def source(num_tasks: int | None = 5, seed: int = 0) -> TaskSource:
    return TaskSource("fake/Env-v0", "train", num_tasks, seed)


def take(s: TaskSource, n: int) -> list[int]:
    return [s.next().index for _ in range(n)]


def test_each_epoch_is_a_new_permutation() -> None:
    s = source(50)
    first, second = take(s, 50), take(s, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_order_hangs_on_the_seed_alone() -> None:
    assert take(source(50), 120) == take(source(50), 120)
    assert take(source(50), 50) != take(source(50, seed=1), 50)
    # A run started on another machine or release must see the same tasks.
    assert take(source(5), 5) == ORDER_OF_SEED_0
    assert source().next().seed == SEED_OF_THE_FIRST


def test_without_end_counts_up() -> None:
    assert take(source(None), 4) == [0, 1, 2, 3]


def test_requeued_tasks_come_first_and_survive_a_restart() -> None:
    s = source(50)
    tasks = [s.next() for _ in range(60)]
    s.requeue(tasks[3])
    s.requeue(tasks[1])
    other = source(50)
    other.restore(s.state())
    assert [s.next() for _ in range(2)] == [tasks[3], tasks[1]]
    assert take(other, 20) == [tasks[3].index, tasks[1].index, *take(s, 18)]


def test_task_seeds_differ() -> None:
    seeds = {
        task_seed(seed, split, index)
        for seed in range(10)
        for split in ("train", "test")
        for index in range(100)
    }
    assert len(seeds) == 2000
    assert all(0 <= s < 2**31 for s in seeds)


def test_held_out_seeds_are_not_those_of_training() -> None:
    # An environment that draws its tasks from the seed alone knows a task by nothing else.
    trained = source(None)
    seeds = {trained.next().seed for _ in range(1000)}
    assert not seeds & {task.seed for task in held_out_tasks("fake/Env-v0", "test", 300, 0)}


def test_a_run_of_an_earlier_release_keeps_its_seeds() -> None:
    old = TaskSource("fake/Env-v0", "train", 5, 0, task_seeds="by_index")
    assert old.next() == Task("fake/Env-v0", "train", 0, 923217268)
    (held_out,) = held_out_tasks("fake/Env-v0", "test", 1, 0, task_seeds="by_index")
    assert held_out.seed == 923217268


def test_held_out_tasks_are_fixed_and_unique_until_used_up() -> None:
    tasks = held_out_tasks("fake/Env-v0", "test", 25, 0, num_tasks=10)
    assert tasks == held_out_tasks("fake/Env-v0", "test", 25, 0, num_tasks=10)
    indices = [t.index for t in tasks]
    assert sorted(indices[:10]) == sorted(indices[10:20]) == list(range(10))
    assert tasks[:7] == held_out_tasks("fake/Env-v0", "test", 7, 0, num_tasks=10)
    assert [t.index for t in held_out_tasks("fake/Env-v0", "test", 3, 0)] == [0, 1, 2]


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match="'train' of fake/Env-v0 has 0 tasks"):
        source(0)


ORDER_OF_SEED_0 = [0, 3, 4, 1, 2]
SEED_OF_THE_FIRST = 1391412768
