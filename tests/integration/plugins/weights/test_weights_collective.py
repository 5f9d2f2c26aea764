"""The collective channel: who is in the group, who dies in it, and that nobody waits for ever."""

import json
import math
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.pace import scaled, wait_until
from support.weight_ends import TENSORS, assert_equal, assert_holds, elsewhere, end, shifted

from rollart_plugins.weights.collective import ADDRESS_FILE, CollectiveChannel
from rollart_plugins.weights.in_server import rollart_group as group

LIMIT_S = scaled(30.0)
"""Of all that is alive. Who is connected is waited for as long, and asks in these tests."""
HANG_S = scaled(3.0)
"""Where one end hangs for good."""


@pytest.fixture
def ends(tmp_path):
    opened = []

    def open_end(location=None, **options):
        options = {"timeout_s": LIMIT_S, "gather_s": 0.1, "bucket_bytes": 1 << 16} | options
        opened.append(CollectiveChannel(str(location or tmp_path / "w"), **options))
        return opened[-1]

    yield open_end
    for one in reversed(opened):
        one.close()
    assert not [t for t in threading.enumerate() if t.name == "rollart-weights"]


def at_once(channels, version):
    """Fetch with all of them at the same time; return what each got, or its error."""
    got = [None] * len(channels)

    def work(i, channel):
        try:
            got[i] = list(channel.fetch(version))
        except Exception as e:
            got[i] = e

    threads = [threading.Thread(target=work, args=a) for a in enumerate(channels)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_engines_that_ask_at_once_share_one_broadcast(ends, monkeypatch):
    writer, readers = ends(gather_s=LIMIT_S), [ends(), ends(), ends()]
    alone = []
    monkeypatch.setattr(CollectiveChannel, "_alone", lambda *a: alone.append(a) or iter(()))
    groups = set()
    for version in (1, 2, 3):
        writer.publish(version, shifted(version).items())
        assert [r.newest() for r in readers] == [version] * 3  # all are connected
        for got in at_once(readers, version):
            assert_equal(got, version)
        groups.add(tuple(r._group.member.size for r in readers))
    assert groups == {(4, 4, 4)}
    assert not alone


def join_as_a_server(broadcast):
    """Join as the first process in the way of inference servers: by the address and the name."""
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=LIMIT_S)
    address = f"tcp://{broadcast.host}:{broadcast.port}"
    rank, size = broadcast.first_rank, broadcast.num_ranks
    store = next(c10d.rendezvous(address, rank, size, timeout=limit))[0]
    store = c10d.PrefixStore(broadcast.group, store)
    settings = {"group_name": broadcast.group, "timeout": limit}
    made, _ = c10d._new_process_group_helper(size, rank, [], "gloo", store, **settings)
    return made


def join(broadcast, rank):
    """Join as another process of a server; torch registers a name once in a process."""
    store, _ = group.open_store(broadcast.host, broadcast.port, LIMIT_S)
    place = group.Membership(broadcast.group, rank, broadcast.num_ranks)
    return group.BroadcastGroup(store, place, "gloo", "127.0.0.1", LIMIT_S)


def receive(broadcast, place, joined):
    """Return what a process of a server receives: flat blocks, cut by names and shapes."""
    if broadcast.group not in joined:
        rank = broadcast.first_rank + place - 1
        joined[broadcast.group] = join(broadcast, rank) if place else join_as_a_server(broadcast)
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    got = []
    for bucket in broadcast.buckets:
        parts = [(name, getattr(torch, dtype), shape) for name, dtype, shape in bucket]
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in parts]
        block = torch.empty(sum(sizes), dtype=torch.uint8)
        if place == 0:
            joined[broadcast.group].broadcast([block], options).wait()
        else:
            joined[broadcast.group].broadcast(block)
        for (name, dtype, shape), data in zip(parts, block.split(sizes), strict=True):
            got.append((name, data.view(dtype).view(shape) if len(data) else TENSORS[name]))
    return got


def test_the_processes_of_servers_receive_one_broadcast(ends):
    """Two servers, with two processes and one; the ends of their engines receive nothing."""
    writer, engines = ends(gather_s=LIMIT_S), [ends(), ends()]
    joined = [{}, {}, {}]
    groups = set()
    for version in (1, 2):
        writer.publish(version, shifted(version).items())
        assert [engine.newest() for engine in engines] == [version] * 2  # all are connected
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(engines[i].broadcast, version, 2 - i) for i in range(2)]
            two, one = (call.result() for call in asked)
            assert {two.first_rank, one.first_rank} in ({1, 3}, {1, 2})
            members = [(one, 0), (two, 1), (two, 2)]
            calls = [pool.submit(receive, *members[i], joined[i]) for i in range(len(members))]
            for call in calls:
                assert_equal(call.result(), version)
        groups |= {(two.group, two.num_ranks), (one.group, one.num_ranks)}
        assert len(two.buckets) > 1
    assert {size for _, size in groups} == {4}
    assert len(groups) == 1  # the group of the first broadcast serves the second
    assert [engine.moved_bytes for engine in engines] == [0, 0]
    assert_equal(list(two.rest(0)), 2)
    with pytest.raises(LookupError, match="no weights of policy version 7"):
        engines[0].broadcast(7, 1)


def test_a_new_engine_gets_a_new_group(ends):
    writer, first = ends(), ends()
    writer.publish(1, TENSORS.items())
    assert_holds(first, 1)
    before = first._group.member
    late = ends()
    assert late.newest() == 1
    assert_holds(late, 1)
    writer.publish(2, shifted(2).items())
    for got in at_once([first, late], 2):
        assert_equal(got, 2)
    assert first._group.member.name != before.name


def test_an_engine_that_leaves_is_not_waited_for(ends):
    writer, stays, leaves = ends(gather_s=LIMIT_S), ends(), ends()
    writer.publish(1, TENSORS.items())
    assert (stays.newest(), leaves.newest()) == (1, 1)  # both are connected
    got = []
    asks = threading.Thread(target=lambda: got.extend(stays.fetch(1)))
    asks.start()
    gathering = wait_until(lambda: writer._hub._gathering, "the first engine's question")
    assert not gathering.complete.is_set()
    leaves.close()
    asks.join()
    assert_equal(got, 0)
    assert gathering.complete.is_set()  # it did not end by its time


def big() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((1 << 16,), float(i)) for i in range(40)}


def _stops_half_way(location: str, mark: str, number: int) -> None:
    channel = end("collective", location, timeout_s=HANG_S, bucket_bytes=1 << 16)
    list(channel.fetch(1))
    Path(mark).write_text("ready")
    while channel.newest() != 2:
        time.sleep(0.01)
    for i, _ in enumerate(channel.fetch(2)):
        if i == 3:
            os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_in_a_broadcast_costs_the_others_nothing(
    ends, tmp_path, number
):
    writer, reader = ends(timeout_s=HANG_S, gather_s=LIMIT_S), ends(timeout_s=HANG_S)
    writer.publish(1, big().items())
    list(reader.fetch(1))
    mark = tmp_path / "mark"
    other = elsewhere(f"{__name__}:_stops_half_way", str(tmp_path / "w"), str(mark), int(number))
    try:
        # Once: a second question for the same version would wait for the other end to ask again.
        wait_until(
            lambda: len(writer._hub._subscribers) > 1 or other.poll() is not None, "a connection"
        )
        list(reader.fetch(1))
        wait_until(lambda: mark.exists() or other.poll() is not None, "its first fetch")
        assert other.poll() is None
        writer.publish(2, big().items())
        began = time.perf_counter()
        got = dict(reader.fetch(2))
        assert time.perf_counter() - began < scaled(60)
        assert all(torch.equal(got[n], t) for n, t in big().items())
        if number == signal.SIGSTOP:
            assert "(stopped)" in Path(f"/proc/{other.pid}/status").read_text()
        writer.publish(3, TENSORS.items())
        other.kill()
        assert other.wait() == -signal.SIGKILL
        assert_holds(reader, 3)
    finally:
        other.kill()
        other.wait()


def test_a_reader_that_stops_reading_leaves_the_others_alone(ends):
    writer, reader, fickle = ends(), ends(), ends()
    writer.publish(1, big().items())
    assert (reader.newest(), fickle.newest()) == (1, 1)  # both are there: they share a group
    got = []
    thread = threading.Thread(target=lambda: got.extend(reader.fetch(1)))
    thread.start()
    half = iter(fickle.fetch(1))
    next(half)
    half.close()
    thread.join()
    assert {n: t.tolist() for n, t in got} == {n: t.tolist() for n, t in big().items()}
    assert dict(fickle.fetch(1)).keys() == big().keys()


def test_a_trainer_that_came_back_is_found_again(ends):
    writer, reader = ends(), ends()
    writer.publish(1, TENSORS.items())
    assert_holds(reader, 1)
    writer.close()
    with pytest.raises(LookupError, match="no trainer publishes at"):
        reader.fetch(2)
    successor = ends()
    successor.publish(2, shifted(2).items())
    assert_holds(reader, 2, 2)


def test_what_began_with_one_edition_does_not_end_with_another(ends):
    """The trainer comes back and publishes the same version, trained anew."""
    writer, reader = ends(), ends()
    writer.publish(1, big().items())
    tensors = iter(reader.fetch(1))
    next(tensors)
    writer.publish(1, [(n, t + 1) for n, t in big().items()])
    reader._group.abandon()
    with pytest.raises(LookupError, match=r"no weights of policy version 1 .* available: \[1\]"):
        list(tensors)
    assert [t[0].item() for _, t in reader.fetch(1)] == [i + 1 for i in range(40)]


def test_a_trainer_that_was_killed_is_waited_for(ends, tmp_path):
    """Its address is still there, and nobody at it."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        there = {"host": "127.0.0.1", "port": gone.getsockname()[1], "token": "t"}
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ADDRESS_FILE).write_text(json.dumps(there))
    assert ends().newest() is None
    with pytest.raises(LookupError, match="no trainer publishes at"):
        ends(timeout_s=0.2).fetch(1)
    got = []
    thread = threading.Thread(target=lambda: got.extend(ends().fetch(1)))
    thread.start()
    ends().publish(1, TENSORS.items())
    thread.join()
    assert_equal(got)


def test_a_trainer_that_does_not_answer_is_given_up(tmp_path):
    """It accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        there = {"host": "127.0.0.1", "port": mute.getsockname()[1], "token": "t"}
        (tmp_path / ADDRESS_FILE).write_text(json.dumps(there))
        reader = CollectiveChannel(str(tmp_path), timeout_s=0.1)
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.2 s"):
            reader.fetch(1)
        reader.close()


def test_an_address_instead_of_a_folder(ends):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    writer = ends(f"tcp://secret@127.0.0.1:{port}")
    writer.publish(1, TENSORS.items())
    assert_holds(ends(f"tcp://secret@127.0.0.1:{port}"), 1)
    with pytest.raises(ValueError, match="rejected the connection: the token is wrong"):
        ends(f"tcp://guess@127.0.0.1:{port}").fetch(1)
    with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1"):
        ends(f"tcp://secret@127.0.0.1:{port}").publish(1, TENSORS.items())


@pytest.mark.parametrize("location", ["tcp://h:1", "tcp://t@h", "http://t@h:1", "tcp://t@h:x"])
def test_what_is_no_address_is_refused(location):
    with pytest.raises(ValueError, match="is not a valid address; use tcp://TOKEN@HOST:PORT"):
        CollectiveChannel(location)


def test_a_stranger_who_talks_otherwise_does_no_harm(ends, tmp_path):
    writer, reader = ends(), ends()
    writer.publish(1, TENSORS.items())
    port = json.loads((tmp_path / "w" / ADDRESS_FILE).read_text())["port"]
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x02\0\0\0[]", b"\x05\0\0\0hello"):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as stranger:
            stranger.sendall(words)
            assert stranger.recv(10) == b""
    assert_holds(reader, 1)
    assert (tmp_path / "w" / ADDRESS_FILE).stat().st_mode & 0o777 == 0o600


def test_without_cuda_nccl_says_so(ends):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    writer, reader = ends(backend="nccl"), ends(backend="nccl")
    writer.publish(1, TENSORS.items())
    assert_holds(reader, 1)  # the group could not be made; its own connection could


@pytest.mark.parametrize("before", [None, "3"])
def test_a_group_of_nccls_never_ends_the_process_it_is_in(monkeypatch, before):
    """The watchdog of such a group reads the variable when the group is made."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_):
            seen.append(os.environ.get(name))

    monkeypatch.setattr(group.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(group.dist, "ProcessGroupNCCL", Group, raising=False)
    place = group.Membership("g", 0, 2)
    group.BroadcastGroup(torch.distributed.HashStore(), place, "nccl", "127.0.0.1", 5.0)
    assert seen == ["2"]
    assert os.environ.get(name) == before
