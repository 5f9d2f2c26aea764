"""Slots, eviction and prefix sharing, without a model."""

import numpy as np
import pytest

from rollart_plugins.engines.sessions import Session, SessionTable, common_prefix


def ids(*tokens: int):
    return np.array(tokens, np.int64)


def begin(table: SessionTable, name: str, prompt, group: str = "") -> Session:
    session = table.acquire(name, group)
    assert session is not None
    session.begin_turn(ids(*prompt))
    return session


def compute(session: Session) -> None:
    session.num_kv, session.settled = session.length, True


@pytest.mark.parametrize(
    ("a", "b", "n"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 9), (1, 2), 1), ((5,), (4,), 0)]
)
def test_common_prefix(a, b, n):
    assert common_prefix(ids(*a), ids(*b)) == n


def test_a_new_turn_computes_only_what_is_new():
    table = SessionTable(1, 32)
    session = begin(table, "s", (1, 2, 3))
    compute(session)
    session.append(4)
    table.end_turn(session)
    assert begin(table, "s", (1, 2, 3, 4, 5)) is session
    assert session.num_kv == 3
    table.end_turn(session)
    assert (
        begin(table, "s", (1, 2)).num_kv == 1
    )  # the last token is computed: its logits are needed


def test_the_session_idle_longest_is_evicted_and_busy_ones_never():
    table = SessionTable(2, 8)
    a, b = begin(table, "a", (1,)), begin(table, "b", (2,))
    assert table.acquire("c", "") is None
    table.end_turn(b)
    table.end_turn(a)
    c = begin(table, "c", (3,))
    assert c.slot == b.slot
    assert table.acquire("a", "") is a
    assert len(table) == 2


def test_release_of_a_busy_session_waits_for_its_turn():
    table = SessionTable(1, 8)
    session = begin(table, "s", (1,))
    table.release("s")
    assert table.acquire("t", "") is None
    table.end_turn(session)
    assert table.acquire("t", "") is not None
    table.release("unknown")


def test_a_second_request_of_a_busy_session_is_apart():
    table = SessionTable(2, 8)
    first, second = begin(table, "s", (1,)), begin(table, "s", (1,))
    assert first.slot != second.slot
    table.end_turn(second)
    table.end_turn(first)
    assert table.acquire("s", "") is first
    assert len(table) == 1


def test_siblings_wait_for_the_first_and_then_copy():
    table, prompt = SessionTable(3, 32), tuple(range(20))
    first, second, third = (begin(table, name, prompt, "g") for name in "abc")
    assert table.donor(first, 0) == (None, 0)
    first.settled = True
    assert table.donor(second, 0) == (first, 0)
    compute(first)
    assert table.donor(second, 0) == (first, 19)
    table.end_turn(first)
    assert table.donor(third, 0) == (first, 19)


@pytest.mark.parametrize("why", ["other version", "other group", "short prefix"])
def test_what_is_not_shared(why):
    table = SessionTable(2, 32)
    donor = begin(table, "a", range(20), "g")
    compute(donor)
    prompt = (*range(4), *range(50, 70)) if why == "short prefix" else tuple(range(20))
    other = begin(table, "b", prompt, "h" if why == "other group" else "g")
    assert table.donor(other, 1 if why == "other version" else 0) == (None, 0)


@pytest.mark.parametrize(("keep", "num_kv", "kv"), [(True, 3, "kept"), (False, 0, "recomputed")])
def test_a_weight_swap_marks_the_cache(keep, num_kv, kv):
    table = SessionTable(1, 8)
    session = begin(table, "s", (1, 2, 3))
    compute(session)
    assert session.swap(1, keep=keep) == (0 if keep else 3)
    assert (session.num_kv, session.kv) == (num_kv, kv)
    assert session.version == (0 if keep else 1)
    table.end_turn(session)
    assert session.kv == ("kept" if keep else "fresh")
