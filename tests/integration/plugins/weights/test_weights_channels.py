"""One contract for every weight channel, alone or over another."""

import gc
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from support.weight_ends import CHANNELS, TENSORS, assert_holds, elsewhere, end, shifted

from rollart_core.runtime.inline import shared_folder, shared_root
from rollart_plugins.weights.disk import DiskChannel
from rollart_plugins.weights.folder import FolderChannel
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

FOLDERS: dict[str, type[FolderChannel]] = {
    "shared-memory": SharedMemoryChannel,
    "disk": DiskChannel,
}


@pytest.fixture(params=CHANNELS)
def kind(request):
    return request.param


@pytest.fixture
def ends(tmp_path):
    """Opens ends of one channel, and closes them."""
    opened = []

    def open_end(kind, where="w", **options):
        opened.append(end(kind, tmp_path / where, **options))
        return opened[-1]

    yield open_end
    for one in reversed(opened):
        one.close()


def test_what_is_published_is_fetched_in_order(kind, ends):
    writer, reader = ends(kind), ends(kind)
    publication = writer.publish(3, TENSORS.items())
    assert publication.policy_version == 3
    assert publication.num_bytes == sum(t.nbytes for t in TENSORS.values())
    assert_holds(reader, 3)
    assert reader.newest() == 3
    assert reader.moved_bytes == writer.moved_bytes > 0


def test_many_buckets_are_one_version(kind, ends):
    options = {"bucket_bytes": 24}
    if kind.startswith("delta"):
        over = kind.removeprefix("delta").removeprefix("-") or "shared-memory"
        options = {"over": CHANNELS[over] | options}
    writer, reader = ends(kind, **options), ends(kind, **options)
    for version in (1, 2):
        writer.publish(version, shifted(version).items())
        assert_holds(reader, version, version)


def test_tensors_are_taken_one_by_one(ends):
    """Those of a sharded trainer do not fit into one process all at once."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def made():
        nonlocal most
        for i in range(20):
            tensor = torch.full((256,), float(i))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(r() is not None for r in alive))
            yield f"t{i}", tensor
            del tensor
            gc.collect()

    for name in ("shared-memory", "disk"):
        ends(name, name, bucket_bytes=2048).publish(1, made())
    assert most <= 5, "a bucket holds two of them"


def test_only_the_newest_are_kept(kind, ends):
    writer, reader = ends(kind, keep=2), ends(kind, keep=2)
    for version in (8, 9, 10, 11):
        writer.publish(version, shifted(version).items())
    assert_holds(reader, 10, 10)
    assert_holds(reader, 11, 11)
    if not kind.startswith("delta"):  # which holds what those build on as well
        with pytest.raises(LookupError, match=r"no weights of policy version 9 .*\[10, 11\]"):
            list(reader.fetch(9))


def test_a_version_that_never_was_is_a_lookup_error(kind, ends):
    with pytest.raises(LookupError, match=r"no trainer (publishes at|has published there)"):
        ends(kind, "nowhere").fetch(0)
    assert ends(kind, "nowhere").newest() is None
    writer, reader = ends(kind), ends(kind)
    writer.publish(1, TENSORS.items())
    with pytest.raises(LookupError, match=r"no weights of policy version 0 .*\[1\]"):
        reader.fetch(0)
    assert_holds(reader, 1)


def test_a_version_that_is_being_read_outlives_its_removal(kind, ends):
    writer, reader = ends(kind, keep=1), ends(kind, keep=1)
    writer.publish(1, TENSORS.items())
    opened = reader.fetch(1)
    if not kind.endswith("collective"):  # there nothing moves before it is asked for
        writer.publish(2, shifted(1).items())
    got = dict(opened)
    assert {n: t.tolist() for n, t in got.items()} == {n: t.tolist() for n, t in TENSORS.items()}


def test_the_same_version_may_be_published_again(kind, ends):
    writer, reader = ends(kind), ends(kind)
    for shift in (0, 1):
        writer.publish(1, shifted(shift).items())
        assert_holds(reader, 1, shift=shift)


def test_a_trainer_that_went_back_takes_its_higher_versions_with_it(kind, ends):
    writer, reader = ends(kind), ends(kind)
    for version in (5, 6, 7):
        writer.publish(version, shifted(version).items())
    assert_holds(reader, 7, 7)
    writer.publish(6, shifted(1).items())
    assert reader.newest() == 6
    assert_holds(reader, 6, 1)
    with pytest.raises(LookupError):
        reader.fetch(7)


def test_closing_the_publisher_leaves_nothing_behind(kind, ends, tmp_path):
    writer, reader = ends(kind), ends(kind)
    writer.publish(1, TENSORS.items())
    assert_holds(reader, 1)
    reader.close()
    assert_holds(ends(kind), 1)
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_publication_is_not_seen(kind, ends, tmp_path):
    def breaks():
        yield "z.weight", TENSORS["z.weight"] + 1
        raise ValueError("no more")

    writer, reader = ends(kind), ends(kind)
    with pytest.raises(ValueError, match="no more"):
        writer.publish(1, breaks())
    assert reader.newest() is None
    assert not list(tmp_path.glob("w/*"))
    writer.publish(1, TENSORS.items())
    with pytest.raises(ValueError, match="no more"):
        writer.publish(2, breaks())
    assert reader.newest() == 1
    assert_holds(reader, 1)
    writer.publish(2, shifted(2).items())
    assert_holds(reader, 2, 2)


def test_what_is_fetched_is_the_readers_own(kind, ends):
    writer, reader, other = ends(kind), ends(kind), ends(kind)
    writer.publish(1, TENSORS.items())
    first = dict(reader.fetch(1))
    first["z.weight"].fill_(9)
    writer.publish(2, shifted(2).items())
    list(reader.fetch(2))
    assert first["z.weight"].eq(9).all(), "a later fetch must not change it"
    assert_holds(other, 1)
    assert_holds(reader, 2, 2)


def _reads(folder: str, version: int) -> None:
    for kind in CHANNELS:
        channel = end(kind, f"{folder}/{kind}")
        assert_holds(channel, version, version)
        channel.close()


@pytest.mark.slow
def test_readers_in_other_processes_late_ones_too(tmp_path):
    writers = {kind: end(kind, tmp_path / kind) for kind in CHANNELS}
    for writer in writers.values():
        for version in (1, 2, 3):
            writer.publish(version, shifted(version).items())
    readers = [elsewhere(f"{__name__}:_reads", str(tmp_path), version) for version in (3, 2)]
    codes = [process.wait() for process in readers]
    for writer in writers.values():
        writer.close()
    assert codes == [0, 0]


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_publisher_that_is_killed_leaves_only_whole_versions(kind, tmp_path):
    """The killed one has written part of version 2 under a hidden name; the next tidies up."""
    assert _forked(_killed, kind, str(tmp_path)) == signal.SIGKILL
    assert len(list(tmp_path.glob(".*.part"))) == 1
    reader = end(kind, tmp_path)
    assert reader.versions() == [1]
    assert_holds(reader, 1)
    successor = end(kind, tmp_path)
    successor.publish(3, shifted(3).items())
    assert not list(tmp_path.glob(".*.part"))
    assert not [p for p in tmp_path.glob("*.safetensors") if p.name.startswith("v2")]
    assert_holds(reader, 3, 3)
    FOLDERS[kind].remove(str(tmp_path))
    assert not tmp_path.exists()


def test_a_run_that_was_killed_leaves_nothing_once_another_begins(kind):
    name = f"killed-{os.getpid()}"  # other suites on this machine have folders of their own
    assert _forked(_run_killed, kind, name) == signal.SIGKILL
    left = list(shared_root().glob(f"rollart-run-*-{name}"))
    assert left
    mine = shared_folder("weights-other")
    mine.rmdir()
    assert not [p for p in left if p.exists()]


def _forked(work, *args) -> int:
    """Run ``work`` in a fork; return the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        finally:
            os._exit(3)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def _killed(kind: str, folder: str) -> None:
    channel = end(kind, folder)
    channel.publish(1, TENSORS.items())
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # just before the rename
    channel.publish(2, shifted(2).items())


def _run_killed(kind: str, name: str) -> None:
    channel = end(kind, shared_folder(name) / "weights")
    channel.publish(1, TENSORS.items())
    os.kill(os.getpid(), signal.SIGKILL)


def test_damaged_files_are_found_out(tmp_path):
    big = {"w": torch.arange(1000.0), "v": torch.ones(3)}
    for kind in ("shared-memory", "disk"):
        folder = tmp_path / kind
        writer, reader = end(kind, folder), end(kind, folder)
        for cut in (40, 600, 4000):
            writer.publish(1, big.items())
            _cut(folder, cut)
            with pytest.raises(ValueError, match="damaged"):
                list(reader.fetch(1))
        writer.close()


def test_a_changed_bit_on_disk_is_found_out(tmp_path):
    writer = end("disk", tmp_path / "w")
    writer.publish(1, TENSORS.items())
    file = next((tmp_path / "w").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged: '.+' does not match its checksum"):
        list(end("disk", tmp_path / "w").fetch(1))
    writer.close()


def _cut(folder: Path, size: int) -> None:
    file = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:size])


def test_readers_share_the_pages_of_the_file_and_cannot_write_them(tmp_path):
    channel = SharedMemoryChannel(str(tmp_path / "w"))
    channel.publish(1, TENSORS.items())
    dict(channel.fetch(1))["z.weight"].fill_(9)
    assert_holds(channel, 1)
    channel.close()


def test_options_out_of_range_are_refused(tmp_path):
    for kind in CHANNELS:
        with pytest.raises(ValueError, match="keep"):
            end(kind, tmp_path, keep=0)
