"""Which tasks come how often, by how often they have been solved."""

from collections import Counter

import pytest

from rollart_core.config.training import Curriculum
from rollart_core.errors import ConfigError
from rollart_core.scheduling import curriculum as module
from rollart_core.scheduling.curriculum import CurriculumTasks
from rollart_core.scheduling.task_mix import TaskMix, WeightedSource
from rollart_core.scheduling.tasks import TaskSource
from rollart_core.types import Group, Task, Ticket, Trajectory


def sources(num_tasks=50, **weights):
    return {
        name: WeightedSource(TaskSource(name, "train", num_tasks, 7), weight)
        for name, weight in weights.items()
    }


def ended(number, task, *successes, rewards=None):
    name = f"g{number:04d}"
    members = tuple(
        Trajectory(
            Ticket(f"{name}.{i}", task, name, i),
            "finished",
            reward=float(won) if rewards is None else rewards[i],
            success=bool(won),
        )
        for i, won in enumerate(successes)
    )
    return Group(name, task, members, len(members))


def test_it_is_the_mix_until_enough_is_known():
    plain = TaskMix(list(sources(a=2, b=1).values()), 3)
    ours = CurriculumTasks(sources(a=2, b=1), Curriculum(begin_after=8), 3)
    assert [ours.next() for _ in range(40)] == [plain.next() for _ in range(40)]


def test_what_is_always_solved_comes_less_and_is_not_forgotten():
    ours = CurriculumTasks(sources(a=1, b=1), Curriculum(begin_after=4, floor=0.25), 0)
    a, b = Task("a", "train", 0, 0), Task("b", "train", 0, 0)
    ours.heed(ended(0, a, 1, 1, 1, 1))
    ours.heed(ended(1, b, 1, 0, 0, 1))
    assert (ours.factor(0), ours.factor(1)) == (1, 1)  # between batches nothing changes
    ours.turn()
    # a: p = 1, 4 p (1 - p) = 0, so the floor; b: p = 1/2, 4 p (1 - p) = 1.
    assert (ours.factor(0), ours.factor(1)) == (0.25, 1)
    came = Counter(ours.next().env_id for _ in range(100))
    assert came == {"a": 20, "b": 80}
    assert ours.gauges()["curriculum/a/solved"] == 1


def test_what_counts_as_solved_may_be_a_reward():
    ours = CurriculumTasks(sources(a=1, b=1), Curriculum(begin_after=2, solved_at=0.6), 0)
    ours.heed(ended(0, Task("a", "train", 0, 0), 1, 1, rewards=[0.5, 0.7]))
    ours.turn()
    assert ours.gauges()["curriculum/a/solved"] == 0.5


def test_the_order_in_which_groups_end_changes_nothing():
    groups = [ended(i, Task("a", "train", i, 0), i % 2, 1) for i in range(6)]
    states = []
    for order in (groups, groups[::-1]):
        ours = CurriculumTasks(sources(a=1, b=1), Curriculum(begin_after=2, window=8), 0)
        for group in order:
            ours.heed(group)
        ours.turn()
        states.append(ours.state())
    assert states[0] == states[1]


def test_a_solved_task_is_passed_over_once():
    ours = CurriculumTasks(sources(num_tasks=3, a=1), Curriculum(retire_above=0.75), 0)
    first = [ours.next() for _ in range(3)]
    ours.heed(ended(0, first[0], 1, 1, 1, 0))
    ours.heed(ended(1, first[1], 1, 1, 0, 0))
    ours.turn()
    again = [ours.next().index for _ in range(5)]
    assert sorted(again[:2]) == sorted(t.index for t in first[1:])
    assert first[0].index in again[2:]
    assert ours.num_passed_over == 1


def test_it_goes_on_from_its_state_and_over_what_was_given_since():
    config = Curriculum(begin_after=2, retire_above=0.5)
    ours = CurriculumTasks(sources(num_tasks=4, a=2, b=1), config, 0)
    given = [ours.next() for _ in range(6)]
    for number, task in enumerate(given):
        ours.heed(ended(number, task, number % 2, 1))
    ours.turn()
    ours.requeue(given[2])
    state = ours.state()
    since = [ours.next() for _ in range(7)]
    again = CurriculumTasks(sources(num_tasks=4, a=2, b=1), config, 0)
    again.restore(state)
    assert again.state() == state
    for task in since:
        again.given(task)
    assert [again.next() for _ in range(9)] == [ours.next() for _ in range(9)]


def test_a_task_that_never_was_is_not_looked_for_without_end(monkeypatch):
    monkeypatch.setattr(module, "MOST_SKIPPED", 50)
    ours = CurriculumTasks(sources(num_tasks=4, a=1, b=1), Curriculum(), 0)
    with pytest.raises(ConfigError, match="is not among the next 50 tasks of a"):
        ours.given(Task("a", "train", 99, 0))
