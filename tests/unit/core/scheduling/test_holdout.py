"""Validation tasks are taken out of the training tasks, and no cluster is on both sides."""

from collections import Counter
from itertools import islice

import pytest

from rollart_core.errors import ConfigError
from rollart_core.scheduling.tasks import TaskSource, held_out_tasks, hold_out

ENV = "fake/Env-v0"


def lists(num_tasks, wanted, clusters=None):
    found = hold_out(ENV, "train", num_tasks, wanted, clusters)
    held = [found.held(i) for i in range(found.num_held or 0)]
    return held, [found.kept(i) for i in range(found.num_kept or 0)]


def test_the_lists_are_disjoint_and_have_all_tasks() -> None:
    held, kept = lists(400, 64)
    assert len(held) == 64
    assert sorted([*held, *kept]) == list(range(400))
    assert held != list(range(64))
    # The tasks of another process, seed or release must be the same.
    assert lists(400, 8)[0] == HELD_OF_400
    assert set(lists(400, 8)[0]) < set(held)


def test_at_most_a_fifth_is_held_out_and_at_least_one() -> None:
    assert len(lists(100, 64)[0]) == 20
    assert len(lists(3, 64)[0]) == 1
    for num_tasks in (0, 1):
        with pytest.raises(ConfigError, match=r"name another evaluation\.validation_split"):
            lists(num_tasks, 64)


def test_tasks_of_a_cluster_stay_together() -> None:
    clusters = [f"product {i % 40}" for i in range(480)]
    held, kept = lists(480, 10, clusters)
    assert len(held) == 10
    assert len(kept) == 480 - 4 * 12  # a tenth of the products, and all tasks of each
    assert sorted(Counter(clusters[i] for i in held).values()) == [2, 2, 3, 3]
    assert not {clusters[i] for i in held} & {clusters[i] for i in kept}
    large = ["a"] * 50 + ["b"] * 40
    assert lists(90, 10, large) == (list(range(50, 60)), list(range(50)))
    with pytest.raises(ConfigError, match="has 1 cluster"):
        lists(4, 2, ["a"] * 4)


def test_of_a_split_without_end_each_block_lends_one() -> None:
    found = hold_out(ENV, "train", None, 64, None)
    held = [found.held(i) for i in range(50)]
    kept = [found.kept(i) for i in range(450)]
    assert sorted([*held, *kept]) == list(range(500))
    assert len({index % 10 for index in held}) > 5
    assert kept == sorted(kept)


@pytest.mark.parametrize("num_tasks", [60, None])
def test_no_epoch_has_a_held_out_task_and_a_resume_goes_on(num_tasks) -> None:
    found = hold_out(ENV, "train", num_tasks, 9, None)
    held = {found.held(i) for i in range(found.num_held or 40)}

    def source() -> TaskSource:
        return TaskSource(ENV, "train", found.num_kept, 0, index_of=found.kept)

    one = source()
    given = [one.next().index for _ in range(170)]
    assert not held & set(given)
    if num_tasks is not None:
        assert (
            sorted(given[:51]) == sorted(given[51:102]) == [i for i in range(60) if i not in held]
        )
    other = source()
    other.restore(one.state())
    assert [t.next().index for t in [other] * 60] == [one.next().index for _ in range(60)]
    wanted = islice(
        (
            task.index
            for task in held_out_tasks(
                ENV, "train", 8, 0, num_tasks=found.num_held, index_of=found.held
            )
        ),
        8,
    )
    assert set(wanted) <= held


HELD_OF_400 = [85, 103, 134, 170, 236, 243, 287, 384]
