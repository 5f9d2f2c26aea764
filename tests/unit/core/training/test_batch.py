"""Canonical order, minibatches, packing, and prefix trees, all on numpy."""

import numpy as np
import pytest

from rollart_core.training import batch
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory
from rollart_cpu.training import tree


def sample(tokens: list[int], mask: list[int] | None = None) -> Sample:
    m = np.array(mask or [0] + [1] * (len(tokens) - 1), dtype=bool)
    ids = np.array(tokens, dtype=np.int32)
    versions = np.where(m, 3, -1).astype(np.int32)
    return Sample(ids, m, m.astype(np.float32), versions, versions)


def group(name: str, members: list[list[int]]) -> Group:
    task = Task("test/Env-v1", "train", 0, 0)
    trajectories = [
        Trajectory(Ticket(f"{name}.{i}", task, name, i), "finished", (sample(t),), reward=0.0)
        for i, t in enumerate(members)
    ]
    return Group(name, task, tuple(trajectories), len(members))


def rows_of(groups: list[Group], values: list[float]) -> list[batch.BatchRow]:
    samples = [s for g in groups for s in g.samples]
    advantages = [
        np.full(s.num_tokens, v, np.float32) for s, v in zip(samples, values, strict=True)
    ]
    return batch.make_rows(groups, advantages, policy_version=5)


def test_canonical_order_forgets_the_order_of_arrival() -> None:
    a, b = group("a", [[1, 2], [3, 4]]), group("b", [[5, 6]])
    swapped = Group("a", a.task, a.trajectories[::-1], 2)
    assert [g.group_id for g in batch.canonical([b, swapped])] == ["a", "b"]
    assert batch.canonical([b, swapped])[0].trajectories == a.trajectories


def test_rows_carry_group_and_staleness_and_leave_out_samples_without_loss_tokens() -> None:
    rows = rows_of([group("a", [[1, 2], [7]]), group("b", [[5, 6]])], [1.0, 1.0, 2.0])
    assert [(r.group, r.staleness, r.sample.num_tokens) for r in rows] == [(0, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([], "0 rows for 1 samples"),
        ([np.zeros(3, np.float32)], "shape"),
        ([np.array([0, np.nan], np.float32)], "not finite"),
    ],
)
def test_advantages_that_do_not_fit_are_refused(advantages: list[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch.make_rows([group("a", [[1, 2]])], advantages, 0)


def test_a_loss_token_with_nothing_before_it_is_refused() -> None:
    g = group("a", [[1, 2]])
    g.samples[0].loss_mask[0] = True
    with pytest.raises(ValueError, match="first token"):
        batch.make_rows([g], [np.zeros(2, np.float32)], 0)


@pytest.mark.parametrize(
    ("policy", "forwarded", "samples", "tokens"),
    [("train", 4, 4, 4), ("skip", 1, 4, 4), ("drop", 1, 1, 1)],
)
def test_zero_advantages(
    policy: batch.ZeroAdvantage, forwarded: int, samples: int, tokens: int
) -> None:
    rows = rows_of([group("a", [[1, 2], [1, 3]]), group("b", [[5, 6], [5, 7]])], [0, 2, 0, 0])
    (minibatch,) = batch.split(rows, 1, policy)
    assert len(minibatch.rows) == forwarded
    assert (minibatch.total_samples, minibatch.total_loss_tokens) == (samples, tokens)


def test_minibatches_hold_whole_groups_and_are_even() -> None:
    groups = [group(name, [[1, 2], [1, 3]]) for name in "abcde"]
    parts = batch.split(rows_of(groups, [1.0] * 10), 2, "drop")
    assert [sorted({r.group for r in m.rows}) for m in parts] == [[0, 1, 2], [3, 4]]


def test_nothing_to_learn_is_one_empty_minibatch() -> None:
    (minibatch,) = batch.split(rows_of([group("a", [[1, 2]])], [0.0]), 2, "drop")
    assert minibatch.rows == ()


def test_pack_is_next_fit_decreasing() -> None:
    assert batch.pack([3, 9, 4, 4, 20], 10) == [[4], [1], [2, 3], [0]]


def test_the_model_reads_up_to_the_last_loss_token() -> None:
    assert batch.model_input(sample([5, 6, 7, 8], [0, 1, 1, 0])).tolist() == [5, 6]


def test_a_tree_by_hand() -> None:
    rows = [np.array(r, np.int32) for r in ([1, 2, 3], [1, 2], [1, 9, 3], [1, 2, 3])]
    prefixes = tree.build(rows)
    assert prefixes.num_nodes == 5  # 1, 12, 123, 19, 193
    assert prefixes.paths[0].tolist() == prefixes.paths[3].tolist()


def test_a_subset_plan_asks_only_for_what_is_wanted() -> None:
    prefixes = tree.build([np.arange(200, dtype=np.int32), np.arange(150, dtype=np.int32)])
    plan = tree.subset_plan(prefixes, np.array([3, 140]))
    assert sorted(q for b in plan for q in b.queries.reshape(-1).tolist() if q >= 0) == [3, 140]


def test_balanced_bins_are_dealt_largest_first_in_whole_rounds() -> None:
    assert batch.balance([9, 3, 4, 8, 2], 100, 2) == [[0, 1, 4], [3, 2]]
    assert batch.balance([9, 3, 4, 8, 2], 9, 2) == [[0], [3], [1, 4], [2]]
    assert batch.balance([50, 1], 9, 3) == [[0], [1]]  # too long a row: alone; a rank has none


def test_imbalance_is_what_ranks_wait_for_the_slowest_of_each_round() -> None:
    assert batch.imbalance([4, 4, 3, 3], 2) == 1.0
    assert batch.imbalance([6, 2], 2) == 1.5
    assert batch.imbalance([5], 3) == 3.0


def test_levelled_bins_are_a_multiple_of_the_ranks_in_their_order() -> None:
    assert batch.level([[0, 1, 2, 3], [4]], 3) == [[0, 1], [2, 3], [4]]
    assert batch.level([[0], [1], [2]], 2) == [[0], [1], [2]]  # nothing is left to halve
