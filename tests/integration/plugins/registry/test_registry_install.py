"""Installation: hashes for everything, nothing from a second place, nothing half installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.registry_installs import differences, fresh, index, planned
from support.registry_wheels import Scene, make_scene, make_wheel

from rollart_core.errors import RegistryError
from rollart_registry.client import opened
from rollart_registry.install import install, sync
from rollart_registry.interpreter import Installed, TargetInterpreter
from rollart_registry.lock import (
    Lock,
    LockedPackage,
    LockedPresent,
    LockedRoot,
    lock_of,
    merged,
    read_lock,
)
from rollart_registry.names import parse_wanted
from rollart_registry.plan import Plan
from rollart_registry.state import state_folder
from rollart_registry.verify import verify_lock, verify_registry

__all__ = ["index"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def library(folder: Path, name: str, version: str = "1.0", *requires: str) -> Path:
    """Write a wheel that is no plugin, as an index has."""
    return make_wheel(folder, name, version, plugin_id=None, entry_point=False, requires=requires)


def names(interpreter: TargetInterpreter) -> set[str]:
    return {f"{d.name} {d.version}" for d in interpreter.again().installed.values()}


def test_install_verify_and_sync(
    scene: Scene, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole road: a package that needs another of the registry, and one of the index."""
    library(index, "maze-walls", "1.5")
    library(index, "acme-tools", "9.9")  # dependency confusion: newer, and in the index
    scene.publish(make_wheel(tmp_path / "d", "acme-tools", plugin_id="acme/Tool-v1"))
    requires = ["acme-tools>=1", "maze-walls", "absent; python_version < '3'"]
    scene.publish(make_wheel(tmp_path / "d", requires=requires))
    scene.accept()
    python = fresh(tmp_path / "one")
    plan = planned(scene, python)
    assert [str(r) for r, _ in plan.releases] == ["acme-maze 1.0.0", "acme-tools 1.0.0"]
    assert [(p.name, p.version) for p in plan.pinned] == [("maze-walls", "1.5")]
    assert names(python) == set()

    path = tmp_path / "rollart.lock"
    lock = install(plan, scene.trusted(), python, path)
    assert names(python) == {"acme-maze 1.0.0", "acme-tools 1.0.0", "maze-walls 1.5"}
    assert read_lock(path) == lock
    assert differences(lock, python) == []

    (installed,) = (tmp_path / "one").rglob("acme_maze/env.py")
    installed.write_text("changed")
    (sandbox_types,) = (tmp_path / "one").rglob("maze_walls/env.py")
    sandbox_types.unlink()
    said = differences(lock, python)
    assert len(said) == 2
    assert "acme_maze/env.py was changed" in said[0]
    assert "maze_walls/env.py cannot be read" in said[1]
    assert sync(lock, python.again()) == ("acme-maze 1.0.0",)

    # On another machine: nothing is trusted yet but what the lock names.
    monkeypatch.setenv("ROLLART_CONFIG_DIR", str(tmp_path / "config2"))
    other = fresh(tmp_path / "two")
    assert len(sync(read_lock(path), other)) == 3
    assert names(other) == names(python)
    assert sync(lock, other.again()) == ()


def test_a_name_of_the_registry_never_comes_from_the_index(
    scene: Scene, tmp_path: Path, index: Path
) -> None:
    """A library of the index needs acme-tools, and somebody put one there."""
    library(index, "acme-tools", "9.9")
    library(index, "maze-walls", "1.5", "acme-tools")
    scene.publish(make_wheel(tmp_path / "d", "acme-tools", plugin_id="acme/Tool-v1"))
    scene.publish(make_wheel(tmp_path / "d", requires=["maze-walls"]))
    scene.accept()
    with pytest.raises(RegistryError, match=r"acme-tools 9.9 from your index.*slip one in"):
        planned(scene, fresh(tmp_path / "one"))


@pytest.mark.slow
def test_a_dependency_that_is_not_to_be_had(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "d", requires=["no-such-thing"]))
    scene.accept()
    python = fresh(tmp_path / "one")
    with pytest.raises(RegistryError, match="no-such-thing") as caught:
        planned(scene, python)
    assert "\n" not in str(caught.value)
    assert names(python) == set()


def test_a_source_distribution_is_not_built(scene: Scene, tmp_path: Path, index: Path) -> None:
    """Building one would run its code before anybody has agreed."""
    (index / "maze-walls-1.0.tar.gz").write_bytes(b"code that would run")
    scene.publish(make_wheel(tmp_path / "d", requires=["maze-walls"]))
    scene.accept()
    with pytest.raises(RegistryError, match="maze-walls"):
        planned(scene, fresh(tmp_path / "one"))


def test_what_the_index_changed_is_refused(scene: Scene, tmp_path: Path, index: Path) -> None:
    """Between the plan and the installation; then nothing at all is installed."""
    library(index, "maze-walls")
    scene.publish(make_wheel(tmp_path / "d", requires=["maze-walls"]))
    scene.accept()
    python = fresh(tmp_path / "one")
    plan = planned(scene, python)
    make_wheel(index, "maze-walls", "1.0", plugin_id=None, files={"maze_walls/evil.py": ""})
    with pytest.raises(RegistryError, match="DO NOT MATCH THE HASHES"):
        install(plan, scene.trusted(), python, tmp_path / "rollart.lock")
    assert names(python) == set()
    assert not (tmp_path / "rollart.lock").exists()


@pytest.mark.slow
def test_a_wheel_that_was_changed_after_it_was_shown(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "d"))
    scene.accept()
    python = fresh(tmp_path / "one")
    plan = planned(scene, python)
    kept = plan.releases[0][1].path
    make_wheel(kept.parent, files={"acme_maze/evil.py": ""})
    with pytest.raises(RegistryError, match="DO NOT MATCH THE HASHES"):
        install(plan, scene.trusted(), python, tmp_path / "rollart.lock")
    assert names(python) == set()


def put(python: TargetInterpreter, wheel: Path) -> TargetInterpreter:
    """Unpack a wheel of pure Python, as an installation of long ago."""
    (site,) = Path(python.python).parents[1].glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, site, format="zip")
    return python.again()


@pytest.mark.slow
def test_what_is_there_already_stays_and_is_in_the_lock(
    scene: Scene, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(index, "maze-walls", "2.0")
    scene.publish(make_wheel(tmp_path / "d", requires=["maze-walls"]))
    scene.accept()
    python = put(fresh(tmp_path / "one"), library(tmp_path / "old", "maze-walls", "1.0"))
    plan = planned(scene, python)
    assert plan.present == (("maze-walls", "1.0"),)
    assert plan.pinned == ()
    everything = planned(scene, python, lock_all=True)
    assert [(p.name, p.version) for p in everything.pinned] == [("maze-walls", "2.0")]
    assert everything.replaces == ("maze-walls 1.0",)
    lock = lock_of(plan, scene.trusted())
    other = fresh(tmp_path / "two")
    with pytest.raises(RegistryError, match=r"maze-walls 1.0 \(here: none\).*--allow-drift"):
        sync(lock, other)
    assert names(other) == set()


def test_a_wheel_that_would_overwrite_another_package(scene: Scene, tmp_path: Path) -> None:
    files = {"maze_walls/env.py": "", "maze_walls/__init__.py": ""}
    scene.publish(make_wheel(tmp_path / "d", files=files))
    scene.accept()
    python = put(fresh(tmp_path / "one"), library(tmp_path / "old", "maze-walls"))
    with pytest.raises(RegistryError, match="'maze_walls', which maze-walls 1"):
        planned(scene, python)


def test_a_wheel_that_would_overwrite_a_module(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "d", files={"walls.cpython-311-darwin.so": ""}))
    scene.accept()
    old = make_wheel(tmp_path / "old", "maze-walls", plugin_id=None, files={"walls.py": ""})
    python = put(fresh(tmp_path / "one"), old)
    with pytest.raises(RegistryError, match="'walls', which maze-walls 1"):
        planned(scene, python)


def test_wheels_of_one_plan_that_overwrite_each_other(scene: Scene, tmp_path: Path) -> None:
    files = {"acme_maze/env.py": "class Trap: ..."}
    scene.publish(make_wheel(tmp_path / "d", "acme-tools", plugin_id="acme/Tool-v1", files=files))
    scene.publish(make_wheel(tmp_path / "d", requires=["acme-tools"]))
    scene.accept()
    with pytest.raises(RegistryError, match="'acme_maze', which acme_tools"):
        planned(scene, fresh(tmp_path / "one"))


def test_a_wheel_of_the_index_that_writes_into_one_of_the_registry(
    scene: Scene, tmp_path: Path, index: Path
) -> None:
    files = {"acme_maze/more.py": ""}
    make_wheel(index, "maze-walls", plugin_id=None, entry_point=False, files=files)
    scene.publish(make_wheel(tmp_path / "d", requires=["maze-walls"]))
    scene.accept()
    python = fresh(tmp_path / "one")
    lock = tmp_path / "rollart.lock"
    with pytest.raises(RegistryError, match="'acme_maze', which maze-walls"):
        install(planned(scene, python), scene.trusted(), python, lock)
    assert not lock.exists()


HERE = LockedRoot(1, "0" * 64)


def a_lock(packages: dict[str, str], present: dict[str, str]) -> Lock:
    return Lock(
        registry="file:///ours",
        root=HERE,
        ids=("acme/Maze-v1",),
        packages=tuple(LockedPackage(n, v, "0" * 64, f"{n}.whl") for n, v in packages.items()),
        present=tuple(LockedPresent(n, v) for n, v in present.items()),
    )


def test_a_lock_does_not_keep_what_was_replaced_since() -> None:
    old = a_lock({"acme-maze": "1.0", "walls": "1.0", "doors": "1.0"}, {"numpy": "1.0"})
    new = a_lock({"acme-tools": "1.0"}, {"walls": "2.0", "doors": "1.0", "numpy": "2.0"})
    both = merged(old, new, Path("rollart.lock"))
    assert {p.name: p.version for p in both.packages} == {
        "acme-maze": "1.0",
        "doors": "1.0",
        "acme-tools": "1.0",
    }
    assert {p.name: p.version for p in both.present} == {"walls": "2.0", "numpy": "2.0"}


def test_a_package_without_its_record_is_told(scene: Scene, tmp_path: Path) -> None:
    installed = Installed("walls", "1.0", (), tmp_path, frozenset({"walls"}), record="")
    python = TargetInterpreter("python", {"walls": installed}, {}, has_pip=True, bin=tmp_path)
    with opened(scene.trusted()) as client:
        (said,) = verify_lock(client, a_lock({"walls": "1.0"}, {}), python)
    assert said.startswith("walls has no RECORD")


@pytest.mark.parametrize("variable", ["ROLLART_CONFIG_DIR", "XDG_CONFIG_HOME"])
@pytest.mark.parametrize("given", ["config", "~/config", "there/../config"])
def test_trust_is_kept_under_a_path_that_pip_names_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, given: str
) -> None:
    monkeypatch.delenv("ROLLART_CONFIG_DIR")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, given)
    assert state_folder().is_relative_to(tmp_path / "config")
    assert ".." not in state_folder().parts


def test_a_lock_that_was_changed(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "d"))
    scene.publish(make_wheel(tmp_path / "d", "acme-tools", plugin_id="acme/Tool-v1"))
    scene.accept()
    path = tmp_path / "rollart.lock"
    wanted = parse_wanted("acme/Maze-v1")
    with opened(scene.trusted()) as client:
        release = client.find(wanted)
        plan = Plan(wanted, ((release, client.wheel(release)),), (), (), ())
    lock = lock_of(plan, scene.trusted())
    empty = fresh(tmp_path / "one")
    (package,) = lock.packages
    attempts = {
        "is expected": replace(lock, packages=(replace(package, sha256="0" * 64),)),
        "has no acme/other": replace(lock, packages=(replace(package, target="acme/other.whl"),)),
        "another registry": replace(lock, root=replace(lock.root, sha256="0" * 64)),
        "but it is in the registry": replace(lock, packages=(replace(package, target=None),)),
    }
    for said, changed in attempts.items():
        with pytest.raises(RegistryError, match=said):
            sync(changed, empty)
    path.write_text(json.dumps({"lock_version": 2}))
    with pytest.raises(RegistryError, match="is not a lock file: lock_version"):
        read_lock(path)
    with pytest.raises(RegistryError, match="rollart registry install"):
        read_lock(tmp_path / "absent.lock")
    assert names(empty) == set()


@pytest.mark.slow
def test_an_environment_without_pip(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "d"))
    scene.accept()
    python = fresh(tmp_path / "one", pip=False)
    install(planned(scene, python), scene.trusted(), python, tmp_path / "rollart.lock")
    assert names(python) == {"acme-maze 1.0.0"}


@pytest.mark.slow
def test_a_lock_of_another_registry_is_kept(scene: Scene, tmp_path: Path) -> None:
    python = fresh(tmp_path / "one")
    other = make_scene(tmp_path / "other")
    for one in (scene, other):
        one.publish(make_wheel(tmp_path / "d"))
        one.accept()
    path = tmp_path / "rollart.lock"
    lock_of(planned(scene, python), scene.trusted()).write(path)
    before = path.read_bytes()
    with pytest.raises(RegistryError, match="give --lock another file"):
        install(planned(other, python), other.trusted(), python, path)
    assert path.read_bytes() == before
    assert names(python) == set()


def test_verify_a_registry(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "d"))
    scene.publish(make_wheel(tmp_path / "d", version="2.0"))
    scene.accept()
    with opened(scene.trusted()) as client:
        assert verify_registry(client) == (2, [])
    one = min(scene.tree.targets.rglob("*.whl"))
    one.write_bytes(one.read_bytes()[:-1] + b"x")
    shutil.rmtree(scene.trusted().folder / "wheels")
    with opened(scene.trusted()) as client:
        good, wrong = verify_registry(client)
    assert good == 1
    assert "not the one that was signed" in wrong[0]


def test_a_python_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="cannot be run as Python"):
        TargetInterpreter.at(tmp_path / "no-python")


def test_what_an_interpreter_is_asked_needs_no_site_packages(tmp_path: Path) -> None:
    python = fresh(tmp_path / "one", pip=False)
    assert python.installed == {}
    assert not python.has_pip
    said = subprocess.run(
        [python.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert python.markers["python_version"] == said.stdout.strip()
