"""Packing and prefix trees of any rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart_core.training import batch
from rollart_cpu.training import tree

rows_strategy = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=150), min_size=1, max_size=8
)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_pack_loses_nothing_and_keeps_the_budget(costs: list[int], budget: int) -> None:
    bins = batch.pack(costs, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(costs)))
    assert all(len(b) == 1 or sum(costs[i] for i in b) <= budget for b in bins)


@given(rows_strategy)
@settings(max_examples=25, deadline=None)
def test_paths_spell_their_rows_and_no_prefix_is_computed_twice(rows: list[list[int]]) -> None:
    arrays = [np.array(r, np.int32) for r in rows]
    prefixes = tree.build(arrays)
    for row, path in zip(rows, prefixes.paths, strict=True):
        assert prefixes.token_ids[path].tolist() == row
        assert prefixes.positions[path].tolist() == list(range(len(row)))
    distinct = {tuple(r[: n + 1]) for r in rows for n in range(len(r))}
    assert prefixes.num_nodes == len(distinct)


@given(rows_strategy)
@settings(max_examples=25, deadline=None)
def test_every_node_queries_once_and_sees_exactly_its_own_prefix(rows: list[list[int]]) -> None:
    prefixes = tree.build([np.array(r, np.int32) for r in rows])
    every = np.arange(prefixes.num_nodes)
    for plan in (tree.full_plan(prefixes), tree.subset_plan(prefixes, every)):
        seen = dict(seen_keys(bucket) for bucket in each_item(plan))
        assert sorted(seen) == every.tolist()
        for path in prefixes.paths:
            for at, node in enumerate(path.tolist()):
                assert seen[node] == path[: at + 1].tolist()


@given(rows_strategy, st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_shared_packing_counts_distinct_prefixes(rows: list[list[int]], budget: int) -> None:
    arrays = [np.array(r, np.int32) for r in rows]
    bins = tree.pack_shared(arrays, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(rows)))
    for members in bins:
        size = tree.build([arrays[i] for i in members]).num_nodes
        assert size <= max(budget, max(len(rows[i]) for i in members))


def each_item(plan: list[tree.Bucket]):  # type: ignore[no-untyped-def]
    for bucket in plan:
        masked = np.broadcast_to(bucket.masked, (len(bucket.queries), *bucket.masked.shape[1:]))
        for n in range(len(bucket.queries)):
            for slot, query in enumerate(bucket.queries[n].tolist()):
                if query >= 0:
                    yield query, bucket.keys[n], masked[n, slot]


def seen_keys(item):  # type: ignore[no-untyped-def]
    query, keys, masked = item
    whole = np.concatenate([np.zeros(len(keys) - len(masked), bool), masked])
    return query, keys[~whole].tolist()


@given(
    costs=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    budget=st.integers(50, 600),
    num_ranks=st.integers(1, 5),
)
def test_balanced_bins_hold_all_within_the_budget_and_even(
    costs: list[int], budget: int, num_ranks: int
) -> None:
    bins = batch.balance(costs, budget, num_ranks)
    assert sorted(i for members in bins for i in members) == list(range(len(costs)))
    sums = [sum(costs[i] for i in members) for members in bins]
    assert all(s <= budget or len(members) == 1 for s, members in zip(sums, bins, strict=True))
    assert sums == sorted(sums, reverse=True)
    assert len(bins) % num_ranks == 0 or len(bins) == len(costs)
    # Graham's bound: nothing is moved to a bin that was not the emptiest.
    assert all(s - costs[members[-1]] <= sums[-1] for s, members in zip(sums, bins, strict=True))
