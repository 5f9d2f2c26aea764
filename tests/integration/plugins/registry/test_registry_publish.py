"""Owners and operators: what is published, what is refused, and that nothing is left half done."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from pathlib import Path

import pytest
from support.registry_wheels import Scene, failing, make_scene, make_wheel, passing

from rollart_core.errors import RegistryError
from rollart_registry import keys, submission, trust
from rollart_registry.accept import accept
from rollart_registry.client import opened
from rollart_registry.names import check_owner, owner_of_distribution, parse_wanted
from rollart_registry.operator import init
from rollart_registry.tree import locked
from rollart_registry.wheel import read_wheel, wheel_of


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv(keys.PASSPHRASE_VARIABLE, raising=False)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def digest(folder: Path) -> dict[str, str]:
    """Path -> hash of every file of a folder but the locks."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_what_is_accepted_is_what_was_published(scene: Scene, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "dist", requires=["numpy>=1; python_version > '3'"])
    release = scene.publish(wheel)
    assert scene.releases() == []
    scene.accept()
    with opened(scene.trusted()) as client:
        assert client.releases() == (release,)
        assert client.wheel(release).path.read_bytes() == wheel.read_bytes()
    assert release.ids == ("acme/Maze-v1",)
    assert release.licence == "Apache-2.0"
    assert not any(scene.tree.submissions.glob("acme"))


REFUSED = {
    "outside of the namespace": {"plugin_id": "other/Maze-v1"},
    "does not begin with its owner's name": {"name": "numpy"},
    "no entry point in the group 'rollart'": {"entry_point": False},
    "holds no rollart.yaml": {"plugin_id": None},
    "must be of the form": {"plugin_id": "acme/Maze"},
}


@pytest.mark.parametrize(("said", "options"), REFUSED.items())
def test_a_package_that_is_refused_leaves_nothing(
    scene: Scene, tmp_path: Path, said: str, options: dict[str, object]
) -> None:
    scene.trusted()
    before = digest(scene.tree.path)
    with pytest.raises(Exception, match=said) as caught:
        scene.publish(make_wheel(tmp_path / "dist", **options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert digest(scene.tree.path) == before


def test_a_package_that_fails_its_check_is_refused(scene: Scene, tmp_path: Path) -> None:
    before = digest(scene.tree.path)
    with pytest.raises(RegistryError, match=r"fails `rollart check`: .*reward 7 is outside"):
        scene.publish(make_wheel(tmp_path / "dist"), check=failing)
    assert digest(scene.tree.path) == before


def test_a_package_that_is_refused_anyway_is_not_run(scene: Scene, tmp_path: Path) -> None:
    ran = []
    wheel = make_wheel(tmp_path / "dist", plugin_id="other/Maze-v1")
    with pytest.raises(RegistryError):
        scene.publish(wheel, check=lambda path: ran.append(path) or passing(path))
    assert ran == []


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "waiting"])
def test_a_version_never_changes(scene: Scene, tmp_path: Path, accepted: bool) -> None:
    scene.publish(make_wheel(tmp_path / "dist"))
    if accepted:
        scene.accept()
    waiting = scene.tree.submissions / "acme/acme.json"
    said = "published already, and a version never changes" if accepted else "submitted already"
    with pytest.raises(RegistryError, match=said) as caught:
        scene.publish(make_wheel(tmp_path / "other", files={"acme_maze/more.py": ""}))
    assert (f"remove {waiting}" in str(caught.value)) is not accepted


def test_a_refused_version_is_mended_once_its_file_is_removed(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "dist"))
    (outcome,) = accept(scene.operator(), recheck=failing)
    waiting = scene.tree.submissions / "acme/acme.json"
    assert f"stays in {waiting}" in (outcome.refused or "")
    waiting.unlink()
    scene.publish(make_wheel(tmp_path / "mended", files={"acme_maze/more.py": ""}))
    scene.accept()
    assert scene.releases() == ["acme-maze 1.0.0"]


def test_a_submission_that_was_cut_off_is_none(scene: Scene, tmp_path: Path) -> None:
    release = scene.publish(make_wheel(tmp_path / "dist"))
    folder = scene.tree.submissions / "acme"
    wheel = folder / f"{release.sha256}.{release.wheel}"
    half = wheel.read_bytes()[:100]
    wheel.write_bytes(half)
    (outcome,) = accept(scene.operator())
    assert "not a complete wheel" in (outcome.refused or "")
    wheel.unlink()
    (outcome,) = accept(scene.operator())
    assert "the submission is incomplete" in (outcome.refused or "")
    (folder / "acme.json").unlink()
    assert accept(scene.operator()) == []
    assert scene.releases() == []


def test_two_who_publish_at_once(scene: Scene, tmp_path: Path) -> None:
    """Of one owner, on two machines: each has a client state of its own."""
    first = scene.trusted()
    signer = keys.load_signer(scene.key("acme"))
    barrier = threading.Barrier(4)
    failures: list[Exception] = []

    def publish(version: str) -> None:
        state = trust.Trusted(first.base, tmp_path / f"state{version}", first.root, 1)
        wheel = read_wheel(make_wheel(tmp_path / "dist", version=version))
        publisher = submission.Owner("acme", signer, scene.tree.submissions)
        try:
            with opened(state) as client:
                barrier.wait(timeout=60)
                submission.publish(client, publisher, wheel, passing)
        except Exception as e:
            failures.append(e)

    versions = ["1.0", "2.0", "3.0", "4.0"]
    threads = [threading.Thread(target=publish, args=[version]) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    scene.accept()
    assert scene.releases() == [f"acme-maze {version}" for version in versions]


def test_a_submission_from_elsewhere(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "dist"), to=tmp_path / "mail")
    (outcome,) = accept(scene.operator(), tmp_path / "mail")
    assert outcome.refused is None
    assert scene.releases() == ["acme-maze 1.0.0"]


def test_the_operator_may_check_again(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "dist"))
    (outcome,) = accept(scene.operator(), recheck=failing)
    assert "but not for its owner" in (outcome.refused or "")
    (outcome,) = accept(scene.operator(), recheck=passing)
    assert outcome.refused is None


def test_a_yanked_version_is_found_only_by_its_version(scene: Scene, tmp_path: Path) -> None:
    for version in ("1.0.0", "1.1.0", "2.0.0rc1"):
        scene.publish(make_wheel(tmp_path / "dist", version=version))
    scene.accept()
    signer = keys.load_signer(scene.key("acme"))
    wanted = parse_wanted("acme/Maze-v1")

    def yank(version: str, reason: str | None) -> None:
        with opened(scene.trusted()) as client:
            publisher = submission.Owner("acme", signer, scene.tree.submissions)
            submission.yank(client, publisher, parse_wanted(f"acme/Maze-v1@{version}"), reason)
        scene.accept()

    def found(text: str, **options: bool) -> str:
        with opened(scene.trusted()) as client:
            return client.find(parse_wanted(text), **options).version

    assert found("acme/Maze-v1") == "1.1.0"
    yank("1.1.0", "leaks the answer")
    assert found("acme/Maze-v1") == "1.0.0"
    assert found("acme/Maze-v1@1.1.0") == "1.1.0"
    assert found("acme/Maze-v1", allow_yanked=True) == "1.1.0"
    yank("1.0.0", "too")
    yank("2.0.0rc1", "too")
    with opened(scene.trusted()) as client, pytest.raises(RegistryError, match="leaks the answer"):
        client.find(wanted)
    yank("1.1.0", None)
    assert found("acme/Maze-v1") == "1.1.0"
    with pytest.raises(RegistryError, match="has not published"):
        yank("7.0", "never was")


def test_what_is_not_there_is_said(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "dist"))
    scene.accept()
    asked = {
        "acme/Mase-v1": "Did you mean 'acme/Maze-v1'",
        "acne/Maze-v1": "Did you mean 'acme'",
        "acme/Maze-v1@3": "it has 1.0.0",
    }
    for text, said in asked.items():
        with opened(scene.trusted()) as client, pytest.raises(RegistryError, match=said):
            client.find(parse_wanted(text))


@pytest.mark.parametrize("text", ["Maze", "acme/Maze", "acme/Maze-v1@", "acme/Maze-v1@x.y"])
def test_an_id_of_the_wrong_form(text: str) -> None:
    with pytest.raises(RegistryError, match=r"not an id|is not a version"):
        parse_wanted(text)


@pytest.mark.parametrize(
    "name",
    ["acme", "Ac me", "targets", "rollart-extra", "webshop", "../x", "", "new-", "new_", "index"],
)
def test_an_owner_that_cannot_be_added(scene: Scene, name: str) -> None:
    public = keys.load_public(keys.public_file(scene.key("acme")))
    before = digest(scene.tree.path)
    with pytest.raises(RegistryError, match=r"taken|made of|reserved"):
        scene.operator().add_owner(name, [public])
    assert digest(scene.tree.path) == before


def test_an_owner_takes_no_name_of_what_another_has_published(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "dist"))
    scene.accept()
    keys.make_key(tmp_path / "new.key", None)
    public = keys.load_public(keys.public_file(tmp_path / "new.key"))
    with pytest.raises(RegistryError, match="'acme' has published 'acme-maze'"):
        scene.operator().add_owner("acme-maze", [public])
    assert scene.releases() == ["acme-maze 1.0.0"]
    scene.operator().add_owner("acme-labs", [public])
    assert scene.releases() == ["acme-maze 1.0.0"]


def test_how_long_signatures_hold_is_changed_under_the_lock(scene: Scene) -> None:
    policy = scene.folder / "registry-keys/policy.json"
    before = policy.stat().st_ino
    scene.operator().set_validity({})
    assert policy.stat().st_ino == before
    changing = threading.Thread(target=scene.operator().set_validity, args=[{"timestamp": 3.0}])
    with locked(scene.tree.path):
        changing.start()
        changing.join(timeout=0.3)
        assert changing.is_alive()
        policy.write_text(json.dumps(json.loads(policy.read_text()) | {"timestamp_version": 9}))
    changing.join()
    found = json.loads(policy.read_text())
    assert (found["timestamp_version"], found["days"]["timestamp"]) == (9, 3.0)


def test_submissions_lie_in_a_folder_of_their_own(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(scene.tree.path)
    for folder, said in (
        (tmp_path / "link", "the registry itself"),
        (tmp_path / "no", "not a folder"),
    ):
        with pytest.raises(RegistryError, match=said):
            accept(scene.operator(), folder)
    assert not (tmp_path / "no").exists()


def test_names_that_differ_in_dashes_only_are_one() -> None:
    with pytest.raises(RegistryError, match="taken"):
        check_owner("a-b", ["a_b"])


def test_a_distribution_is_the_longest_owners() -> None:
    owners = ["acme", "acme-labs"]
    assert owner_of_distribution("acme-maze", owners) == "acme"
    assert owner_of_distribution("Acme_Labs.maze", owners) == "acme-labs"
    assert owner_of_distribution("acmemaze", owners) is None
    assert owner_of_distribution("a-b-c-x", ["a----b", "a-b-c"]) == "a-b-c"


def test_an_owner_changes_keys_without_a_gap(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "dist"))
    scene.accept()
    old = keys.load_public(keys.public_file(scene.key("acme")))
    new = keys.make_key(tmp_path / "new.key", None)
    with pytest.raises(RegistryError, match="signed by none of the new keys"):
        scene.operator().add_owner("acme", [new], update=True)
    assert scene.releases() == ["acme-maze 1.0.0"]
    scene.operator().add_owner("acme", [old, new], update=True)
    with opened(scene.trusted()) as client:
        signer = keys.load_signer(tmp_path / "new.key")
        submission.renew(client, submission.Owner("acme", signer, scene.tree.submissions))
    scene.accept()
    scene.operator().add_owner("acme", [new], update=True)
    assert scene.releases() == ["acme-maze 1.0.0"]
    with pytest.raises(RegistryError, match="does not sign for 'acme'"):
        scene.publish(make_wheel(tmp_path / "dist", version="2.0"))


def test_a_tree_that_was_changed_is_not_signed_on_top_of(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "dist"))
    scene.accept()
    role = scene.tree.role_file("acme", 1)
    role.write_bytes(role.read_bytes().replace(b"A maze.", b"A trap."))
    with pytest.raises(RegistryError, match="is not what was signed"):
        scene.operator().refresh()


def test_root_may_need_several_keys(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, root_keys=3, root_threshold=2)
    scene.operator().refresh_root()
    assert scene.releases() == []
    (tmp_path / "registry-keys/root1").unlink()
    scene.operator().refresh_root()
    assert scene.releases() == []
    (tmp_path / "registry-keys/root2").unlink()
    with pytest.raises(RegistryError, match=r"too few keys of root .*1/2"):
        scene.operator().refresh_root()
    assert scene.releases() == []


def test_a_registry_is_not_made_where_something_is(scene: Scene, tmp_path: Path) -> None:
    before = digest(tmp_path)
    with pytest.raises(RegistryError, match="exists and is not empty"):
        init(scene.operator(), passphrase=None)
    inside = scene.operator()
    inside.keys = scene.tree.path / "keys"
    with pytest.raises(RegistryError, match="private keys would be served"):
        init(inside, passphrase=None)
    assert digest(tmp_path) == before


def test_private_keys_are_for_one_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "acme.key"
    public = keys.make_key(path, "open sesame")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"ENCRYPTED" in path.read_bytes()
    with pytest.raises(RegistryError, match=keys.PASSPHRASE_VARIABLE):
        keys.load_signer(path)
    with pytest.raises(RegistryError, match="wrong passphrase"):
        keys.load_signer(path, lambda _: "open barley")
    assert keys.load_signer(path, lambda _: "open sesame").public_key == public
    monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, "open sesame")
    assert keys.load_signer(path).public_key == public
    with pytest.raises(RegistryError, match="never overwritten"):
        keys.make_key(path, None)
    with pytest.raises(RegistryError, match="is a private key"):
        keys.load_public(path)
    path.chmod(0o644)
    with pytest.raises(RegistryError, match="chmod 600"):
        keys.load_signer(path)


def test_no_file_of_a_registry_holds_a_private_key(scene: Scene) -> None:
    for path in scene.tree.path.rglob("*"):
        assert not path.is_file() or b"PRIVATE" not in path.read_bytes()
    folder = scene.folder / "registry-keys"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    private = [path for path in folder.iterdir() if b"PRIVATE" in path.read_bytes()]
    assert len(private) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


@pytest.mark.slow
def test_a_project_is_built_without_touching_it(tmp_path: Path) -> None:
    project = tmp_path / "acme-maze"
    (project / "acme_maze").mkdir(parents=True)
    (project / "acme_maze/__init__.py").touch()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "acme-maze"\nversion = "1.0"\n'
        '[tool.setuptools]\npackages = ["acme_maze"]\n'
    )
    before = digest(project)
    (tmp_path / "work").mkdir()
    assert wheel_of(project, tmp_path / "work").name == "acme_maze-1.0-py3-none-any.whl"
    assert digest(project) == before


def test_what_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="neither a wheel nor a folder"):
        wheel_of(tmp_path, tmp_path)


@pytest.mark.slow
def test_a_project_that_cannot_be_built(tmp_path: Path) -> None:
    project = tmp_path / "acme-maze"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["no-such"]\nbuild-backend = "no_such_backend"\n'
    )
    (tmp_path / "work").mkdir()
    with pytest.raises(RegistryError, match="install its build backend") as caught:
        wheel_of(project, tmp_path / "work")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(scene: Scene, tmp_path: Path) -> None:
    scene.tree.path.chmod(0o500)
    try:
        with pytest.raises(RegistryError, match="cannot"):
            scene.publish(make_wheel(tmp_path / "dist"))
    finally:
        scene.tree.path.chmod(0o700)
