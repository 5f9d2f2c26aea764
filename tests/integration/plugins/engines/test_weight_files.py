"""Weights on their way to servers: folders that several machines see, files, and what is left."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from rollart_core.errors import EngineDied, InferenceFailure
from rollart_plugins.engines.config import SGLangConfig
from rollart_plugins.engines.server_checks import ModelFacts
from rollart_plugins.engines.sglang import SGLangEngine
from rollart_plugins.engines.sglang_weights import FolderTransport, SGLangTransport
from rollart_plugins.engines.weight_files import link_model, new_folder, write_model
from rollart_plugins.engines.weight_transport import WeightTransport
from rollart_plugins.weights.disk import DiskChannel
from rollart_plugins.weights.shared_memory import SharedMemoryChannel
from rollart_sandboxes.pool import owner
from rollart_testing import FakeWeightChannel

WEIGHTS = [(f"t{i}", torch.full((8,), float(i))) for i in range(5)]
NO_CLIENT: Any = None


def written_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a loader finds which goes by the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {file.name for file in folder.glob("*.safetensors")} == set(index.values())
    return {name: load_file(folder / file)[name] for name, file in index.items()}


def test_an_engine_removes_what_killed_ones_of_its_own_machine_left(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1, check=True
    )
    here, pid = owner.stamp().split("-")[0], int(ended.stdout)
    orphan = tmp_path / f"rollart-sglang-{here}-{pid}-1-a"
    alive = tmp_path / f"rollart-sglang-{owner.stamp()}b"
    elsewhere = tmp_path / f"rollart-sglang-00000000-{pid}-1-c"
    of_old, notes = tmp_path / f"rollart-sglang-{pid}-d", tmp_path / "rollart-sglang-notes"
    others = (alive, elsewhere, of_old, notes)
    for folder in (orphan, *others):
        folder.mkdir()
    capacity = new_folder("sglang", str(tmp_path))
    assert set(tmp_path.iterdir()) == {*others, capacity}
    assert capacity.stat().st_mode & 0o777 == 0o755
    assert not owner.is_left(capacity.name)


def test_a_bucket_of_copies_is_held_at_a_time(tmp_path: Path) -> None:
    seen: list[int] = []

    def coming() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS:
            seen.append(len(list(tmp_path.glob("*.safetensors"))))
            yield name, tensor

    assert write_model(tmp_path, coming(), bucket_bytes=2 * 32) == 5 * 32
    assert seen == [0, 0, 0, 1, 1]  # a file is there before what follows is asked for
    found = written_in(tmp_path)
    assert list(found) == [name for name, _ in WEIGHTS]
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("*.safetensors")} == {0o644}


def test_views_of_one_memory_are_written_as_what_they_are(tmp_path: Path) -> None:
    both = torch.arange(12.0).view(2, 6)
    write_model(tmp_path, [("a", both[0]), ("b", both[1]), ("c", both.T)])
    found = written_in(tmp_path)
    assert [found[name].tolist() for name in "abc"] == [*both.tolist(), both.T.tolist()]


def disk_transport(tmp_path: Path) -> FolderTransport:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (model / name).write_text("{}")
    return FolderTransport(NO_CLIENT, model, str(tmp_path / "weights"), 64)


def test_a_version_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from WEIGHTS
        raise ValueError("damaged")

    transport = disk_transport(tmp_path)
    whole = transport.prepare(WEIGHTS)
    assert (whole / "config.json").read_text() == "{}"
    assert set(written_in(whole)) == {name for name, _ in WEIGHTS}
    with pytest.raises(ValueError, match="damaged"):
        transport.prepare(breaks())
    assert list(whole.parent.iterdir()) == [whole]
    shutil.rmtree(transport._home)
    with pytest.raises(InferenceFailure, match=r"new weights cannot be written to .*No such file"):
        transport.prepare(WEIGHTS)
    transport.close()
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("kind", [SharedMemoryChannel, DiskChannel])
def test_a_launched_server_reads_the_channels_own_files(
    tmp_path: Path, kind: type[DiskChannel]
) -> None:
    channel = kind(str(tmp_path / "shared" / "channel"), keep=1, bucket_bytes=40)
    channel.publish(1, WEIGHTS)
    files = channel.files(1)
    assert len(files) > 1
    transport = disk_transport(tmp_path)
    folder = transport.prepare(channel.fetch(1), files)
    inodes = {file.stat().st_ino for file in folder.glob("*.safetensors")}
    assert inodes == {file.stat().st_ino for file in files}  # no copy
    assert (folder / "config.json").read_text() == "{}"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {name for name, _ in WEIGHTS}
    channel.publish(2, WEIGHTS)  # removes version 1 from the channel
    for name, tensor in written_in(folder).items():
        assert torch.equal(tensor, dict(WEIGHTS)[name])
    with pytest.raises(LookupError, match="policy version 1"):
        channel.files(1)
    with pytest.raises(LookupError, match="are gone"):
        transport.prepare(iter(WEIGHTS), files)
    shutil.rmtree(folder)
    transport.close()
    channel.close()
    assert [p.name for p in (tmp_path / "shared").iterdir()] == []


def test_only_launched_servers_read_the_files_of_a_channel(tmp_path: Path) -> None:
    given: list[object] = []

    class Records(WeightTransport):
        def prepare(self, tensors: Any, files: Any = None) -> None:
            list(tensors)
            given.append(files)

        async def send(self, ready: Any, tag: str, *, keep_kv: bool) -> None: ...

    channel = SharedMemoryChannel(str(tmp_path / "channel"))
    channel.publish(1, WEIGHTS)
    engine: Any = SGLangEngine(model_path="m")
    for launched in (True, False):
        engine._process = object() if launched else None
        engine._prepared(channel, Records(), 1)
    assert given == [channel.files(1), None]
    channel.close()


def test_a_disk_that_takes_no_weights_costs_the_engine_and_wrong_weights_do_not(
    tmp_path: Path,
) -> None:
    class Held(FakeWeightChannel):
        moved_bytes = 0

    async def go() -> None:
        channel = Held()
        engine: Any = SGLangEngine(model_path="m", channel=channel)
        engine._client, engine._transport = object(), disk_transport(tmp_path)
        engine._death = asyncio.get_running_loop().create_future()
        engine._swap_lock = asyncio.Lock()
        engine._facts = ModelFacts(shapes={name: (8,) for name, _ in WEIGHTS})
        channel.publish(1, WEIGHTS[1:])
        with pytest.raises(ValueError, match="lack 't0'"):
            await engine.load_weights(1)
        assert list(engine._transport._home.iterdir()) == []
        channel.publish(2, WEIGHTS)
        shutil.rmtree(engine._transport._home)
        with pytest.raises(EngineDied, match="new weights failed: new weights cannot be written"):
            await engine.load_weights(2)
        assert engine._death.done()

    asyncio.run(go())


@pytest.mark.parametrize("key", ["weight_transport", "weight_road", "backend", "host"])
def test_keys_of_earlier_releases_say_what_replaces_them(key: str) -> None:
    with pytest.raises(ValidationError, match=f"{key} was removed: servers join the broadcast"):
        SGLangConfig.model_validate({key: "gloo"})


def test_what_is_in_no_file_is_written_beside_the_links(tmp_path: Path) -> None:
    channel = SharedMemoryChannel(str(tmp_path / "shared" / "channel"), bucket_bytes=40)
    channel.publish(1, WEIGHTS)
    folder = tmp_path / "shared" / "served"
    folder.mkdir()
    head = ("head", torch.ones(3))
    num_bytes = link_model(folder, channel.files(1), [*channel.fetch(1), head])
    assert num_bytes == 5 * 32 + 12
    found = written_in(folder)
    assert torch.equal(found.pop("head"), head[1])
    assert found.keys() == dict(WEIGHTS).keys()
    assert [f.stat().st_nlink for f in sorted(folder.glob("*.safetensors"))] == [2] * 5 + [1]
    channel.close()


def test_the_transport_needs_the_fewest_copies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    channel = SharedMemoryChannel(str(tmp_path / "shared" / "channel"))
    channel.publish(1, WEIGHTS)

    def prepared(files: Any = None, **options: Any) -> Any:
        transport = SGLangTransport(SGLangConfig(**options), NO_CLIENT, str(tmp_path), 1)
        try:
            ready = transport.prepare(WEIGHTS, files)
            if isinstance(ready, Path):
                links = {file.stat().st_nlink for file in ready.glob("*.safetensors")}
                shutil.rmtree(ready)
                return links
            return ready
        finally:
            transport.close()

    folder = {"weights_folder": str(tmp_path / "weights")}
    assert prepared(channel.files(1)) == prepared(channel.files(1), **folder) == {2}
    assert prepared(**folder) == {1}
    (request,) = prepared()
    assert [name for name, _ in pickle.loads(base64.b64decode(request))] == [n for n, _ in WEIGHTS]
    channel.close()
