"""One contract for every weight channel that is a folder."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from rollart_plugins.weights.disk import DiskChannel
from rollart_plugins.weights.folder import FolderChannel
from rollart_plugins.weights.shared_memory import SharedMemoryChannel, default_folder

TENSORS = {
    "z.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a.half": torch.randn(5, 3).to(torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "none": torch.empty(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "counts": torch.tensor([1, 2**40]),
}


@pytest.fixture(params=[SharedMemoryChannel, DiskChannel])
def kind(request: pytest.FixtureRequest) -> type[FolderChannel]:
    return request.param


def assert_holds(channel: FolderChannel, version: int, shift: int = 0) -> None:
    got = list(channel.fetch(version))
    assert [name for name, _ in got] == list(TENSORS)
    for name, tensor in got:
        want = TENSORS[name] + shift if shift else TENSORS[name]
        assert tensor.dtype == want.dtype
        assert tensor.shape == want.shape
        assert torch.equal(tensor, want)


def test_what_is_published_is_fetched_in_order(kind: type[FolderChannel], tmp_path: Path) -> None:
    writer, reader = kind(str(tmp_path / "w")), kind(str(tmp_path / "w"))
    publication = writer.publish(3, TENSORS.items())
    assert publication.policy_version == 3
    assert publication.num_bytes == sum(t.nbytes for t in TENSORS.values())
    assert_holds(reader, 3)
    writer.close()


def test_only_the_newest_are_kept(kind: type[FolderChannel], tmp_path: Path) -> None:
    channel = kind(str(tmp_path / "w"), keep=2)
    for version in (8, 9, 10, 11):
        channel.publish(version, TENSORS.items())
    assert channel.versions() == [10, 11]
    with pytest.raises(LookupError, match=r"no weights of policy version 9 .* holds \[10, 11\]"):
        channel.fetch(9)
    channel.close()


def test_a_version_that_never_was_is_a_lookup_error(
    kind: type[FolderChannel], tmp_path: Path
) -> None:
    with pytest.raises(LookupError, match="no weights of policy version 0"):
        kind(str(tmp_path / "nowhere")).fetch(0)


def test_a_version_that_is_open_outlives_its_removal(
    kind: type[FolderChannel], tmp_path: Path
) -> None:
    writer, reader = kind(str(tmp_path), keep=1), kind(str(tmp_path))
    writer.publish(1, TENSORS.items())
    opened = reader.fetch(1)
    writer.publish(2, ((n, t + 1) for n, t in TENSORS.items()))
    assert {n: t.tolist() for n, t in opened} == {n: t.tolist() for n, t in TENSORS.items()}


def test_the_same_version_may_be_published_again(kind: type[FolderChannel], tmp_path: Path) -> None:
    channel = kind(str(tmp_path))
    channel.publish(1, TENSORS.items())
    channel.publish(1, ((n, t + 1) for n, t in TENSORS.items()))
    assert_holds(channel, 1, shift=1)


def test_closing_the_publisher_leaves_nothing_behind(
    kind: type[FolderChannel], tmp_path: Path
) -> None:
    writer, reader = kind(str(tmp_path / "w")), kind(str(tmp_path / "w"))
    writer.publish(1, TENSORS.items())
    reader.close()
    assert_holds(reader, 1)
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_publication_is_not_seen(kind: type[FolderChannel], tmp_path: Path) -> None:
    def breaks():  # type: ignore[no-untyped-def]
        yield "z.weight", TENSORS["z.weight"]
        raise ValueError("no more")

    channel = kind(str(tmp_path))
    with pytest.raises(ValueError, match="no more"):
        channel.publish(1, breaks())
    assert channel.versions() == []
    assert list(tmp_path.iterdir()) == []


def test_a_publisher_that_is_killed_leaves_only_whole_versions(
    kind: type[FolderChannel], tmp_path: Path
) -> None:
    """The killed one has written part of version 2 under a hidden name; the next tidies up."""
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(kind, tmp_path))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.part"))) == 1
    reader = kind(str(tmp_path))
    assert reader.versions() == [1]
    assert_holds(reader, 1)
    kind.remove(str(tmp_path))
    assert not tmp_path.exists()


def _killed(kind: type[FolderChannel], folder: Path) -> None:
    channel = kind(str(folder))
    channel.publish(1, TENSORS.items())
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # just before the rename
    channel.publish(2, TENSORS.items())


def test_readers_share_the_pages_of_the_file_and_cannot_write_them(tmp_path: Path) -> None:
    channel = SharedMemoryChannel(str(tmp_path))
    channel.publish(1, TENSORS.items())
    dict(channel.fetch(1))["z.weight"].fill_(9)
    assert_holds(channel, 1)


def test_there_is_a_default_folder() -> None:
    assert default_folder().is_dir()


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        DiskChannel(str(tmp_path), keep=0)
