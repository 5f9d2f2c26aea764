"""What somebody might do to a registry or through one: each refused, with the reason."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import socketserver
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.registry_wheels import Scene, make_scene, make_wheel, passing
from tuf.api.metadata import Metadata, TargetFile, Targets
from tuf.ngclient._internal import trusted_metadata_set

from rollart_core.errors import RegistryError
from rollart_registry import keys, operator, submission, trust
from rollart_registry.accept import accept
from rollart_registry.client import opened
from rollart_registry.fetcher import base_url
from rollart_registry.names import parse_wanted
from rollart_registry.wheel import read_wheel

DAY = dt.timedelta(days=1)
NOW = dt.datetime.now(dt.UTC)


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_CONFIG_DIR", str(tmp_path / "config"))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A registry with acme-maze 1.0.0 in it."""
    scene = make_scene(tmp_path)
    scene.publish(make_wheel(tmp_path / "dist"))
    scene.accept()
    return scene


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing; may serve one path without end."""

    endless = ""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if not self.endless or self.endless not in self.path:
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" " * 65536)
        except OSError:
            return None


@contextmanager
def serving(folder: Path, endless: str = "") -> Iterator[str]:
    """Serve a folder on loopback."""
    handler = type("Handler", (Quiet,), {"endless": endless})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(params=["folder", "http"])
def location(request: pytest.FixtureRequest, scene: Scene) -> Iterator[str]:
    """The registry as a client names it."""
    if request.param == "folder":
        yield str(scene.tree.path)
        return
    with serving(scene.tree.path) as url:
        yield url


def fetch(scene: Scene, location: str, wanted: str = "acme/Maze-v1") -> Path:
    with opened(scene.trusted(location)) as client:
        return client.wheel(client.find(parse_wanted(wanted))).path


def wheels(scene: Scene) -> list[Path]:
    return sorted(scene.tree.targets.rglob("*.whl"), key=lambda path: path.name.split(".", 1)[1])


def edit(path: Path, change: Any) -> None:
    """Change the signed part of metadata and leave its signatures."""
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


def test_an_honest_wheel_arrives(scene: Scene, location: str) -> None:
    assert fetch(scene, location).read_bytes() == wheels(scene)[0].read_bytes()


def test_a_tampered_wheel(scene: Scene, location: str) -> None:
    (wheel,) = wheels(scene)
    wheel.write_bytes(wheel.read_bytes().replace(b"1.0.0", b"6.6.6", 1))
    with pytest.raises(RegistryError, match="not the one that was signed"):
        fetch(scene, location)


def test_a_kept_wheel_is_compared_again(scene: Scene, location: str) -> None:
    kept = fetch(scene, location)
    honest = kept.read_bytes()
    kept.write_bytes(b"changed on this disk")
    assert fetch(scene, location).read_bytes() == honest


def test_swapped_versions(scene: Scene, location: str) -> None:
    scene.publish(make_wheel(scene.folder / "dist", version="1.1.0"))
    scene.accept()
    old, new = wheels(scene)
    old_bytes = old.read_bytes()
    old.write_bytes(new.read_bytes())
    new.write_bytes(old_bytes)
    for version in ("1.0.0", "1.1.0"):
        with pytest.raises(RegistryError, match="not the one that was signed"):
            fetch(scene, location, f"acme/Maze-v1@{version}")


def test_mix_and_match_of_old_and_new_metadata(scene: Scene, location: str) -> None:
    scene.publish(make_wheel(scene.folder / "dist", version="1.1.0"))
    scene.accept()
    shutil.copy(scene.tree.role_file("acme", 1), scene.tree.role_file("acme", 2))
    with pytest.raises(RegistryError, match="not the one that was signed"):
        fetch(scene, location)


def test_an_expired_timestamp(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, now=NOW - 30 * DAY, validity=operator.Validity(timestamp=7))
    scene.operator(NOW - 30 * DAY).refresh()
    with pytest.raises(RegistryError, match=r"timestamp.json is expired.*refresh"):
        scene.releases()
    scene.operator().refresh()
    assert scene.releases() == []


def test_a_freeze(scene: Scene, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scene.releases(location) == ["acme-maze 1.0.0"]

    class Later(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Later:
            return cls.fromtimestamp((NOW + 8 * DAY).timestamp(), tz)

    later = SimpleNamespace(datetime=Later, timezone=dt.timezone)
    monkeypatch.setattr(trusted_metadata_set, "datetime", later)
    with pytest.raises(RegistryError, match="somebody withholds newer files from you"):
        scene.releases(location)


def test_a_replayed_old_index(scene: Scene, location: str, tmp_path: Path) -> None:
    shutil.copytree(scene.tree.metadata, tmp_path / "old")
    scene.publish(make_wheel(tmp_path / "dist", version="1.1.0"))
    scene.accept()
    assert "acme-maze 1.1.0" in scene.releases(location)
    shutil.rmtree(scene.tree.metadata)
    shutil.copytree(tmp_path / "old", scene.tree.metadata)
    with pytest.raises(RegistryError, match="rolled back"):
        scene.releases(location)
    with pytest.raises(RegistryError, match="was rolled back"):
        scene.operator().refresh()


def test_metadata_that_nobody_signed(scene: Scene, location: str) -> None:
    scene.trusted(location)
    edit(scene.tree.role_file("timestamp", 0), lambda m: m["signed"].update(version=99))
    with pytest.raises(RegistryError, match="not signed by the keys that are trusted"):
        scene.releases(location)
    with pytest.raises(RegistryError, match="timestamp"):
        scene.operator().refresh()


def test_metadata_signed_with_another_key(scene: Scene, location: str, tmp_path: Path) -> None:
    scene.trusted(location)
    other = make_scene(tmp_path / "other")
    name = other.tree.role_file("timestamp", 0)
    shutil.copy(name, scene.tree.role_file("timestamp", 0))
    with pytest.raises(RegistryError, match="not signed by the keys that are trusted"):
        scene.releases(location)


def test_a_new_root_that_the_old_one_did_not_sign(scene: Scene, tmp_path: Path) -> None:
    scene.trusted()
    other = make_scene(tmp_path / "other")
    other.operator().refresh_root()
    shutil.copy(other.tree.role_file("root", 2), scene.tree.role_file("root", 2))
    with pytest.raises(RegistryError, match=r"not signed by the keys.*then remove its folder"):
        scene.releases()


def test_a_registry_that_was_replaced_by_another(scene: Scene, tmp_path: Path) -> None:
    known = scene.trusted()
    other = make_scene(tmp_path / "other")
    shutil.rmtree(scene.tree.path)
    shutil.copytree(other.tree.path, scene.tree.path)
    with pytest.raises(RegistryError, match="is trusted with the root"):
        trust.trust(known.base, trust.offered_root(known.base))
    with pytest.raises(RegistryError, match=r"not signed by|rolled back"):
        scene.releases()


def forged(scene: Scene, signer: str, targets: dict[str, TargetFile], version: int = 1) -> bytes:
    expires = NOW + 9 * DAY
    metadata: Metadata[Targets] = Metadata(Targets(version, None, expires, targets))
    metadata.sign(keys.load_signer(scene.key(signer)))
    return metadata.to_bytes()


def test_an_owner_who_signs_another_owners_name(scene: Scene, tmp_path: Path) -> None:
    scene.add_owner("evil")
    wheel = make_wheel(tmp_path / "evil", version="9.0.0")
    with pytest.raises(RegistryError, match="outside of the namespace 'evil'"):
        scene.publish(wheel, "evil")
    target = scene.publish(wheel, "acme", to=tmp_path / "elsewhere").as_target()
    data = forged(scene, "evil", {target.path: target}, 2)
    # handed in as acme's
    theirs = scene.tree.submissions / "acme"
    theirs.mkdir(parents=True)
    (theirs / "acme.json").write_bytes(data)
    # and as evil's own
    own = scene.tree.submissions / "evil"
    own.mkdir()
    (own / "evil.json").write_bytes(data)
    before = scene.tree.role_file("timestamp", 0).read_bytes()
    refused = {o.owner: o.refused or "" for o in accept(scene.operator())}
    assert "not signed by the key of 'acme'" in refused["acme"]
    assert "another owner's" in refused["evil"]
    assert scene.tree.role_file("timestamp", 0).read_bytes() == before


def test_another_owners_name_is_refused_even_if_the_operator_signs_it(
    scene: Scene, location: str, tmp_path: Path
) -> None:
    scene.add_owner("evil")
    wheel = make_wheel(tmp_path / "evil", version="9.0.0")
    target = scene.publish(wheel, "acme", to=tmp_path / "elsewhere").as_target()
    data = forged(scene, "evil", {target.path: target})
    careless = scene.operator()
    careless.publish(careless.state(), {"evil": Metadata.from_bytes(data)})
    served = scene.tree.target_file(
        "acme", target.hashes["sha256"], "acme_maze-9.0.0-py3-none-any.whl"
    )
    shutil.copy(wheel, served)
    with opened(scene.trusted(location)) as client:
        assert [str(r) for r in client.releases()] == ["acme-maze 1.0.0"]
        assert list(client.refused) == ["evil"]
        with pytest.raises(RegistryError, match="not from its owner"):
            client.download(target.path, target.hashes["sha256"])


def test_a_key_that_the_operator_did_not_delegate_to(scene: Scene, tmp_path: Path) -> None:
    keys.make_key(scene.key("stranger"), None)
    signer = keys.load_signer(scene.key("stranger"))
    with opened(scene.trusted()) as client:
        with pytest.raises(RegistryError, match="delegated nothing to this key"):
            submission.owner_of_key(client, signer)
        with pytest.raises(RegistryError, match="does not sign for 'acme'"):
            submission.owner_of_key(client, signer, "acme")


@pytest.mark.parametrize(
    "target", ["timestamp.json", "acme.json", ".whl"], ids=["timestamp", "owner", "wheel"]
)
def test_endless_data(scene: Scene, target: str) -> None:
    with (
        serving(scene.tree.path, endless=target) as url,
        pytest.raises(RegistryError, match="more bytes than"),
    ):
        fetch(scene, url)


def test_a_published_version_that_changes(scene: Scene, tmp_path: Path) -> None:
    """The owner's own key, and yet: replaced, removed, or with another record."""
    with opened(scene.trusted()) as client:
        (release,) = client.releases()
    other = make_wheel(tmp_path / "other", files={"acme_maze/more.py": ""})
    folder = scene.tree.submissions / "acme"
    folder.mkdir(parents=True)
    honest = release.as_target()
    replaced = TargetFile.from_file(honest.path, str(other), ["sha256"])
    replaced.unrecognized_fields = honest.unrecognized_fields
    edited = release.as_target()
    edited.custom["release"]["summary"] = "Something else."
    attempts: dict[str, dict[str, TargetFile]] = {
        "replaces": {honest.path: replaced},
        "removes": {},
        "the record of": {honest.path: edited},
    }
    for said, targets in attempts.items():
        (folder / "acme.json").write_bytes(forged(scene, "acme", targets, 2))
        (outcome,) = accept(scene.operator())
        assert said in (outcome.refused or ""), said
    (folder / "acme.json").write_bytes(forged(scene, "acme", {honest.path: honest}, 1))
    (outcome,) = accept(scene.operator())
    assert "is not newer than version 1" in (outcome.refused or "")


def test_a_record_that_is_not_true_of_its_wheel(scene: Scene, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "new", version="2.0.0", requires=["keylogger"])
    release = scene.publish(wheel, to=tmp_path / "elsewhere")
    target = release.as_target()
    target.custom["release"]["requires"] = []
    with opened(scene.trusted()) as client:
        old = {r.target: r.as_target() for r in client.releases()}
    folder = scene.tree.submissions / "acme"
    folder.mkdir(parents=True)
    (folder / "acme.json").write_bytes(forged(scene, "acme", old | {target.path: target}, 2))
    shutil.copy(wheel, folder / f"{release.sha256}.{release.wheel}")
    (outcome,) = accept(scene.operator())
    assert "differ in requires" in (outcome.refused or "")
    careless = scene.operator()
    metadata = Metadata[Targets].from_file(str(folder / "acme.json"))
    careless.publish(careless.state(), {"acme": metadata})
    shutil.copy(wheel, scene.tree.target_file("acme", release.sha256, release.wheel))
    with pytest.raises(RegistryError, match="signed a record that is not true"):
        fetch(scene, str(scene.tree.path))


MALFORMED: dict[str, Any] = {
    "version": lambda record, target: record.update(version="newest"),
    "another version": lambda record, target: record.update(version="7.0"),
    "a hash that is a path": lambda record, target: target.hashes.update(sha256="../../../evil"),
    "no list": lambda record, target: record.update(provides="everything"),
    "nothing": lambda record, target: record.clear(),
    "an id of another": lambda record, target: record["provides"][0].update(id="other/Maze-v1"),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_record(scene: Scene, change: Any) -> None:
    with opened(scene.trusted()) as client:
        target = client.releases()[0].as_target()
    change(target.custom["release"], target)
    folder = scene.tree.submissions / "acme"
    folder.mkdir(parents=True)
    (folder / "acme.json").write_bytes(forged(scene, "acme", {target.path: target}, 2))
    (outcome,) = accept(scene.operator())
    assert outcome.refused is not None
    careless = scene.operator()
    metadata = Metadata[Targets].from_file(str(folder / "acme.json"))
    careless.publish(careless.state(), {"acme": metadata})
    with opened(scene.trusted()) as client:
        assert client.releases() == ()
        assert list(client.refused) == ["acme"]


HARMFUL = {
    "../evil.py": "leads out",
    "/tmp/evil.py": "leads out",
    "acme_maze/..\\..\\evil.py": "leads out",
    "evil.pth": "whenever Python starts",
    "acme_maze-1.0.0.data/scripts/pip": "files outside of packages",
    "rollart_core/errors.py": "reserved for RollArt",
    ".": "not a plain path",
    "./numpy.py": "not a plain path",
    ".pth": "whenever Python starts",
    "sitecustomize.py": "whenever Python starts",
    "usercustomize/__init__.py": "whenever Python starts",
    "numpy.egg-info/PKG-INFO": "hold one distribution",
    "Other-1.DIST-INFO/entry_points.txt": "hold one distribution",
    "other-1.dist-info/entry_points.txt": "hold one distribution",
}


@pytest.mark.parametrize(("path", "said"), HARMFUL.items())
def test_a_wheel_that_reaches_outside_of_its_packages(path: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=said):
        read_wheel(make_wheel(tmp_path, files={path: "x"}))


def test_a_wheel_whose_files_are_not_what_its_record_says(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    inside["acme_maze/env.py"] = b"class Evil: ..."
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in inside.items():
            archive.writestr(name, data)
    with pytest.raises(RegistryError, match=r"acme_maze/env.py is not what the wheel's RECORD"):
        read_wheel(wheel)


def repacked(wheel: Path, change: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w", packing) as archive:
        for name, data in (inside | change).items():
            archive.writestr(name, data)
    return wheel


def encrypted(wheel: Path) -> Path:
    data = bytearray(wheel.read_bytes())
    for header, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        found = -1
        while (found := data.find(header, found + 1)) >= 0:
            data[found + at] |= 1
    wheel.write_bytes(data)
    return wheel


def garbled(wheel: Path) -> Path:
    data = bytearray(repacked(wheel, {}, zipfile.ZIP_DEFLATED).read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        one = archive.getinfo("acme_maze/env.py")
    start = one.header_offset + 30 + len(one.filename)
    data[start : start + one.compress_size] = b"\xff" * one.compress_size
    wheel.write_bytes(data)
    return wheel


INFO = "acme_maze-1.0.0.dist-info"
FAULTY: dict[str, tuple[Any, str]] = {
    "a hash of one letter": (
        lambda w: repacked(w, {f"{INFO}/RECORD": b"acme_maze/env.py,sha256=a,9\n"}),
        "not a complete wheel",
    ),
    "encrypted": (encrypted, "not a complete wheel: .*encrypted"),
    "garbled": (garbled, "not a complete wheel: .*decompressing"),
    "packed another way": (lambda w: repacked(w, {}, zipfile.ZIP_LZMA), "unsupported compression"),
    "not UTF-8": (lambda w: repacked(w, {f"{INFO}/RECORD": b"\xff"}), "not a complete wheel"),
    "a manifest with faults": (
        lambda w: make_wheel(w.parent, files={"acme_maze/rollart.yaml": "licence: 7\nx: 1\n"}),
        "rollart.yaml.*; ",
    ),
    "a manifest that is none": (
        lambda w: make_wheel(w.parent, files={"acme_maze/rollart.yaml": "]["}),
        "not YAML",
    ),
    "entry points that are none": (
        lambda w: make_wheel(w.parent, files={f"{INFO}/entry_points.txt": "[rollart]\nmaze\n"}),
        "entry_points.txt cannot be read",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), FAULTY.values(), ids=FAULTY)
def test_a_wheel_that_cannot_be_read_is_refused(spoil: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=said) as caught:
        read_wheel(spoil(make_wheel(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["a wheel", "the check"])
def test_what_one_owner_hands_in_stops_no_other(scene: Scene, tmp_path: Path, fault: str) -> None:
    scene.add_owner("able")
    wheel = make_wheel(tmp_path / "able", "able-maze", plugin_id="able/Maze-v1")
    release = scene.publish(wheel, "able")
    scene.publish(make_wheel(tmp_path / "more", version="2.0.0"))
    if fault == "a wheel":
        handed_in = scene.tree.submissions / "able" / f"{release.sha256}.{release.wheel}"
        encrypted(handed_in)
        outcomes = accept(scene.operator())
    else:
        outcomes = accept(scene.operator(), recheck=lambda w: {} if "able" in w else passing(w))
    refused = {o.owner: o.refused for o in outcomes}
    assert refused["acme"] is None
    assert f"it stays in {scene.tree.submissions / 'able/able.json'}" in (refused["able"] or "")
    assert scene.releases() == ["acme-maze 1.0.0", "acme-maze 2.0.0"]


HIDDEN = {
    "[rollart]\nmaze = acme_maze.plugin\n; hidden = os\n": ("rollart", "; hidden", "os"),
    "[rollart]\nmaze = acme_maze.plugin\n  more = os\n": ("rollart", "more", "os"),
    "[rollart]\nmaze = acme_maze.plugin\n[rollart]\nx = os\n": ("rollart", "x", "os"),
}


@pytest.mark.parametrize(("text", "hidden"), HIDDEN.items())
def test_entry_points_are_shown_as_python_will_read_them(
    text: str, hidden: tuple[str, str, str], tmp_path: Path
) -> None:
    wheel = read_wheel(make_wheel(tmp_path, files={f"{INFO}/entry_points.txt": text}))
    assert wheel.entry_points == tuple(sorted([("rollart", "maze", "acme_maze.plugin"), hidden]))


def test_half_a_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(RegistryError, match="not a complete wheel"):
        read_wheel(wheel)


@pytest.mark.parametrize("name", ["evil.whl", "acme_maze-1.0.0.whl", "a b-1-py3-none-any.whl"])
def test_a_bad_wheel_file_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="not a wheel file name"):
        read_wheel(make_wheel(tmp_path).rename(tmp_path / name))


def test_a_wheel_that_calls_itself_something_else(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path).rename(tmp_path / "acme_other-1.0.0-py3-none-any.whl")
    with pytest.raises(RegistryError, match="is acme-maze 1"):
        read_wheel(wheel)


def test_a_dependency_by_address(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, requires=["tool @ https://example.org/tool-1-py3-none-any.whl"])
    with pytest.raises(RegistryError, match="never from an address"):
        read_wheel(wheel)


def test_a_registry_that_is_down(scene: Scene) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as free:
        port = free.server_address[1]
    with pytest.raises(RegistryError, match="cannot be reached"):
        trust.offered_root(base_url(f"http://127.0.0.1:{port}"))


@pytest.mark.parametrize("missing", ["1.root", "timestamp", "3.snapshot", "2.targets", "1.acme"])
def test_a_half_written_registry(
    scene: Scene, location: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLART_CONFIG_DIR", str(tmp_path / "a machine that has seen nothing"))
    if missing != "1.root":
        scene.trusted(location)
    (scene.tree.metadata / f"{missing}.json").unlink()
    with pytest.raises(RegistryError, match="half written"):
        fetch(scene, location)


def test_one_owner_whose_signature_expired_does_not_hide_the_others(
    scene: Scene, tmp_path: Path
) -> None:
    scene.add_owner("late")
    scene.publish(
        make_wheel(tmp_path / "late", "late-maze", plugin_id="late/Maze-v1"), "late", passing
    )
    scene.accept()
    assert len(scene.releases()) == 2
    target = scene.tree.role_file("late", 1)
    metadata = Metadata[Targets].from_file(str(target))
    metadata.signed.expires = NOW - DAY
    metadata.signed.version = 2
    metadata.sign(keys.load_signer(scene.key("late")))
    careless = scene.operator()
    careless.publish(careless.state(), {"late": metadata})
    with opened(scene.trusted()) as client:
        assert [str(r) for r in client.releases()] == ["acme-maze 1.0.0"]
        assert "expired" in client.refused["late"]
        assert client.owner_of("late-anything") == "late"
