"""Trajectories survive the way to disk and back, whatever is in them."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rollart_core.store.trajectory_files import (
    ShardWriter,
    from_rows,
    pack,
    read_shard,
    to_rows,
    trajectory_bytes,
    unpack,
)
from rollart_core.types import (
    Failure,
    FailureKind,
    Message,
    Sample,
    Task,
    Ticket,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)


def sample(num_tokens: int, rng: np.random.Generator) -> Sample:
    mask = rng.random(num_tokens) < 0.3
    return Sample(
        rng.integers(0, 1000, num_tokens, dtype=np.int32),
        mask,
        np.where(mask, rng.normal(size=num_tokens), 0).astype(np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        np.where(mask, 0, -1).astype(np.int32),
    )


def trajectory(index: int = 0, num_samples: int = 2, **fields_) -> Trajectory:
    rng = np.random.default_rng(index)
    ticket = Ticket(f"g0000001.{index}", Task("shop/Env-v0", "train", 4, 11), "g0000001", index, 1)
    turns = (
        Turn("What do you need?", "search[red shoe]", 12, 5, "stop", 0.0, 0.5, 0.25),
        Turn("Résultats: ｆｕｌｌ 🛒\x00 tab\t", "click[a\udc80]", 40, 6, "length", 1.5, 0.5, 0.25),
    )
    defaults = {
        "reward": 0.1 + 0.2,
        "score": 1.0,
        "success": True,
        "reward_components": {"price": 0.5, "type": 1.0},
        "start_version": 3,
        "wall_s": 1.25,
    }
    samples = tuple(sample(7 * (i + 1), rng) for i in range(num_samples))
    return Trajectory(ticket, "finished", samples, **({"turns": turns} | defaults | fields_))


def failed() -> Trajectory:
    failure = Failure(FailureKind.TIMEOUT, "env.step", "30 s are over", False, "Traceback ...")
    ticket = Ticket("g0000002.0", Task("shop/Env-v0", "train", 5, 12), "g0000002", 0)
    return Trajectory(ticket, "failed", failure=failure, start_version=2)


NEW_OF_TURNS = ("messages", "continues", "tools")


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert len(a.samples) == len(b.samples)
    for x, y in zip(a.samples, b.samples, strict=True):
        for f in fields(Sample):
            if f.name == "signals":  # of the run alone
                continue
            left, right = getattr(x, f.name), getattr(y, f.name)
            assert left.dtype == right.dtype, f.name
            np.testing.assert_array_equal(left, right)
    for f in fields(Trajectory):
        if f.name not in ("samples", "turns"):
            assert getattr(a, f.name) == getattr(b, f.name), f.name
    assert [t.observation for t in a.turns] == [t.observation for t in b.turns]
    assert [t.num_new_tokens for t in a.turns] == [t.num_new_tokens for t in b.turns]
    for f in NEW_OF_TURNS:
        assert [getattr(t, f) for t in a.turns] == [getattr(t, f) for t in b.turns]
    assert a.oldest_version == b.oldest_version


CALL: ToolCall = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": "ｆ"}'},
}
TOOL: ToolSpec = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TALK = (
    Turn(
        *("user: Résultats 🛒", "add", 12, 5, "stop", 0.0, 0.5, 0.25),
        messages=(
            Message(role="system", content="Résultats 🛒"),
            Message(role="assistant", content="", reasoning_content="hm", tool_calls=[CALL]),
        ),
        continues=-1,
        tools=(TOOL,),
    ),
    Turn("tool: 3", "3", 40, 6, "length", 1.5, 0.5, 0.25, continues=0),
)
CASES = [
    trajectory(),
    failed(),
    trajectory(2, num_samples=0),
    trajectory(3, success=None, score=None),
    trajectory(4, turns=TALK, env_components={"price": 0.5}, context={"reference": ["é", 1, None]}),
]


def test_rows_give_the_records_back() -> None:
    back = from_rows(to_rows(CASES))
    for a, b in zip(CASES, back, strict=True):
        assert_same(a, b)
    # UTF-8 has no bytes for a lone surrogate; it is written as an escape.
    assert back[0].turns[1].action == "click[a\\udc80]"
    assert [turn.reasoning for turn in back[4].turns] == ["hm", ""]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_blobs_give_the_records_back(index: int) -> None:
    assert_same(unpack(pack(CASES[index])), CASES[index])


def test_records_of_older_releases_are_read() -> None:
    rows = pa.Table.from_batches([to_rows([trajectory()])])
    turns = rows["turns"].to_pylist()
    known = [f for f in rows.schema.field("turns").type.value_type if f.name not in NEW_OF_TURNS]
    old = rows.drop_columns(["env_components", "context", "turns"])
    (back,) = from_rows(old.append_column("turns", pa.array(turns, pa.list_(pa.struct(known)))))
    assert_same(replace(back, turns=()), trajectory(turns=()))
    assert [t.action for t in back.turns] == ["search[red shoe]", "click[a\\udc80]"]


def test_numpy_scalars_of_an_environment_are_taken() -> None:
    odd = trajectory(reward=np.float32(0.5), score=np.float64(1), success=np.bool_(False))
    for back in (unpack(pack(odd)), from_rows(to_rows([odd]))[0]):
        assert (back.reward, back.score, back.success) == (0.5, 1.0, False)


def test_shards_are_numbered_whole_and_in_order(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "t", rows_per_shard=40, next_number=7)
    assert writer.write() is None
    for i in range(40):
        assert not writer.is_full
        writer.add(trajectory(i), 100)
    assert writer.is_full
    assert writer.write() == "part-000007.parquet"
    assert (len(writer), writer.is_full) == (0, False)
    writer.add(failed(), 100)
    assert writer.write() == "part-000008.parquet"
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "part-000007.parquet",
        "part-000008.parquet",
    ]
    back = read_shard(tmp_path / "t" / "part-000007.parquet")
    assert [t.ticket.index for t in back] == list(range(40))


def test_a_shard_is_full_by_bytes_too(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, bytes_per_shard=150)
    writer.add(failed(), 100)
    assert not writer.is_full
    writer.add(failed(), 100)
    assert writer.is_full


def test_rows_stay_when_they_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    writer = ShardWriter(blocked)
    writer.add(failed(), 100)
    with pytest.raises(OSError, match="file"):
        writer.write()
    assert len(writer) == 1


def test_the_size_of_a_trajectory_is_that_of_its_rows_and_texts() -> None:
    one = trajectory(num_samples=1, turns=(Turn("see", "do", 4, 6, "stop", 0.0, 0.1, 0.1),))
    assert trajectory_bytes(one) == 7 * (4 + 1 + 4 + 4 + 4) + 3 + 2
