"""A batch is stored once; each trainer rank gets a reference and maps the stored arrays."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollart_bench.batches import make_groups
from rollart_core.errors import RollartError
from rollart_core.runtime.child import WorkerHost
from rollart_core.runtime.frames import Call, encode
from rollart_core.runtime.records import RecordFile, StoredRecords, file_store, pack, unpack
from rollart_core.runtime.remote import TrainerGroup
from rollart_core.types import Group


def same(ours: Group, theirs: Group) -> bool:
    fields = ("token_ids", "loss_mask", "inference_logprobs", "policy_versions", "turn_ids")
    return (ours.group_id, [t.turns for t in ours.trajectories]) == (
        theirs.group_id,
        [t.turns for t in theirs.trajectories],
    ) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(ours.samples, theirs.samples, strict=True)
        for name in fields
    )


def test_records_come_back_equal_and_their_arrays_are_views():
    groups = make_groups(3, 100)
    content = bytearray(b"".join(pack(groups)))
    found = unpack(content)
    assert len(found) == 3
    assert all(map(same, groups, found))
    begin = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
    for sample in found[1].samples:
        at = sample.token_ids.__array_interface__["data"][0]
        assert begin <= at < begin + len(content)
        assert not sample.token_ids.flags.writeable


@pytest.mark.parametrize("records", [[], [{}], [np.zeros(0)], [np.arange(9)[::2], "text"]])
def test_any_picklable_records_come_back(records: list[Any]):
    found = unpack(b"".join(pack(records)))
    assert [np.asarray(r).tolist() for r in found] == [np.asarray(r).tolist() for r in records]


def test_arrays_are_aligned():
    records = [(b"x" * n, np.arange(3, dtype=np.float64)) for n in range(1, 9)]
    base = np.frombuffer(bytearray(b"".join(pack(records))), np.uint8)
    begin = base.__array_interface__["data"][0]
    for _, array in unpack(base):
        assert (array.__array_interface__["data"][0] - begin) % 64 == 0


def test_a_file_exists_until_the_block_ends_and_readers_keep_its_content(tmp_path: Path):
    async def main() -> None:
        groups = make_groups(2, 50)
        async with file_store(tmp_path / "new")(groups) as stored:
            assert isinstance(stored, RecordFile)
            assert os.path.exists(stored.path)
            found = stored.load()
        assert list((tmp_path / "new").iterdir()) == []
        assert all(map(same, groups, found))

        with pytest.raises(KeyError):
            async with file_store(tmp_path)(groups):
                raise KeyError("the call failed")
        assert [p.name for p in tmp_path.iterdir()] == ["new"]

    asyncio.run(main())


def test_a_folder_without_room_is_named(tmp_path: Path):
    class Refuses:
        def __reduce__(self) -> str:
            raise OSError(28, "No space left on device")

    async def main() -> None:
        async with file_store(tmp_path)(["fits", Refuses()]):
            raise AssertionError("never")

    with pytest.raises(RollartError, match=rf"batch cannot be written to {tmp_path}: No space"):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


class CountingWorker:
    """A rank's worker that counts the bytes of each call and answers it in this process."""

    on_death = None
    alive = True

    def __init__(self, target: Any) -> None:
        self.name = "trainer"
        self.num_bytes = 0
        self.host = WorkerHost()
        self.host.target = target

    async def start(self, factory: Any = None, kwargs: Any = None) -> None:
        pass

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if ":" in method or method == "__build__":
            return "127.0.0.1:1"
        self.num_bytes += len(encode(Call(0, method, args, kwargs)))
        return await self.host.run(method, args, kwargs)

    async def close(self, *, grace_s: float = 5.0) -> None:
        self.alive = False

    def kill(self) -> None:
        self.alive = False


class Target:
    def __init__(self) -> None:
        self.seen: list[Group] = []

    def train_batch(self, groups: list[Group], version: int, *, progress: float | None) -> int:
        self.seen = groups
        return version

    def supervise(self, samples: list[Any], lr: float) -> dict[str, float]:
        return {"tokens": float(sum(s.num_tokens for s in samples)), "lr": lr}

    def close(self) -> None:
        pass


def test_a_batch_for_32_ranks_costs_less_than_a_megabyte_of_calls():
    targets = [Target() for _ in range(32)]
    workers = [CountingWorker(target) for target in targets]
    groups = make_groups(8, 4096)

    async def main() -> None:
        group = TrainerGroup(workers.__getitem__, 32, {})
        await group.start()
        assert await group.train_batch(groups, 7) == 7
        assert await group.supervise(list(groups[0].samples), 0.5) == {
            "tokens": 8 * 4096.0,
            "lr": 0.5,
        }
        sent = sum(w.num_bytes for w in workers)
        await group.close()
        assert 0 < sent < 1_000_000
        assert sum(len(part) for part in pack(groups)) > 4_000_000

    asyncio.run(main())
    for target in targets:
        assert all(map(same, groups, target.seen))


def test_an_error_while_loading_is_the_error_of_the_call():
    class Broken(StoredRecords):
        def load(self) -> list[Any]:
            raise ValueError("it is damaged")

    async def main() -> None:
        await CountingWorker(Target()).host.run("supervise", [Broken(), 1.0], {})

    with pytest.raises(ValueError, match="damaged"):
        asyncio.run(main())
