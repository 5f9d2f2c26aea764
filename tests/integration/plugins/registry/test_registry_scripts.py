"""What a wheel brings besides packages: scripts, and metadata in any language."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.registry_installs import differences, fresh, index, planned
from support.registry_wheels import Scene, make_scene, make_wheel

from rollart_core.errors import RegistryError
from rollart_registry.install import install, sync
from rollart_registry.interpreter import TargetInterpreter
from rollart_registry.lock import Lock
from rollart_registry.verify import script_fault
from rollart_registry.wheel import read_wheel

__all__ = ["index"]
pytestmark = pytest.mark.timeout(300)
INFO = "acme_maze-1.0.0.dist-info"
CODE = "def run():\n    print('out of the maze')\n"


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def with_script(folder: Path, script: str, group: str = "console_scripts") -> Path:
    text = f"[rollart]\nacme-maze = acme_maze.plugin\n[{group}]\n{script} = acme_maze.play:run\n"
    files = {f"{INFO}/entry_points.txt": text, "acme_maze/play.py": CODE}
    return make_wheel(folder, files=files)


@pytest.mark.parametrize("group", ["console_scripts", "gui_scripts"])
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("python", "reserved script name"),
        ("python3.11", "reserved script name"),
        ("PIP3", "reserved script name"),
        ("activate", "reserved script name"),
        ("activate.fish", "reserved script name"),
        ("python3-config", "reserved script name"),
        ("rollart", "reserved script name"),
        ("../evil", "not a plain file name"),
        ("a b", "not a plain file name"),
        (".bashrc", "not a plain file name"),
    ],
)
def test_a_script_of_pythons_is_refused(script: str, said: str, group: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=said):
        read_wheel(with_script(tmp_path, script, group))


def test_a_script_of_its_own_is_none_of_these(tmp_path: Path) -> None:
    for script in ("maze", "pipette", "python-maze", "rollart-maze"):
        assert read_wheel(with_script(tmp_path, script)).scripts == {script: "acme_maze.play:run"}


def test_a_script_that_is_there_already_is_refused(scene: Scene, tmp_path: Path) -> None:
    scene.publish(with_script(tmp_path / "d", "maze"))
    scene.accept()
    python = fresh(tmp_path / "one")
    (python.bin / "maze").write_text("somebody's")
    with pytest.raises(RegistryError, match=r"the script 'maze', and there is one of that name in"):
        planned(scene, python)
    assert (python.bin / "maze").read_text() == "somebody's"


def test_a_script_of_another_distribution_is_refused(
    scene: Scene, tmp_path: Path, index: Path
) -> None:
    """It comes with a dependency, from the index, so that it is known once pip has installed."""
    text = "[console_scripts]\nmaze = maze_walls.play:run\n"
    files = {"maze_walls-1.0.dist-info/entry_points.txt": text, "maze_walls/play.py": CODE}
    make_wheel(index, "maze-walls", "1.0", plugin_id=None, entry_point=False, files=files)
    python = fresh(tmp_path / "one")
    subprocess.run(
        [python.python, "-m", "pip", "install", "-q", "maze-walls"], check=True, cwd=tmp_path
    )
    scene.publish(with_script(tmp_path / "d", "maze"))
    scene.accept()
    with pytest.raises(RegistryError, match=r"'maze', which maze-walls 1.0 has installed"):
        planned(scene, python.again())


def appended(script: Path) -> None:
    script.write_text(script.read_text() + "print('more')\n")


def another_function(script: Path) -> None:
    text = script.read_text()
    script.write_text(text.replace("acme_maze.play", "acme_maze.plugin"))


def another_program(script: Path) -> None:
    lines = script.read_text().splitlines(keepends=True)
    script.write_text("".join(["#!/bin/echo\n", *lines[1:]]))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "more": (appended, "does not run acme_maze.play:run"),
    "another function": (another_function, "does not run acme_maze.play:run"),
    "another program": (another_program, "is not run by the Python of its environment"),
    "no Python": (
        lambda script: script.write_text("#!/bin/sh\necho (\n"),
        "is not what pip writes",
    ),
    "gone": (lambda script: script.unlink(), "cannot be read"),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, TargetInterpreter, Lock]:
    """A package with a script, installed once."""
    folder = tmp_path_factory.mktemp("scripts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLART_CONFIG_DIR", str(folder / "config"))
        patch.setenv("PIP_NO_INDEX", "1")
        scene = make_scene(folder / "scene")
        scene.publish(with_script(folder / "d", "maze"))
        scene.accept()
        python = fresh(folder / "one")
        lock = install(planned(scene, python), scene.trusted(), python, folder / "rollart.lock")
    return scene, python, lock


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_verify_finds_a_changed_script_and_sync_mends_it(
    installed: tuple[Scene, TargetInterpreter, Lock], change: Callable[[Path], None], said: str
) -> None:
    _, python, lock = installed
    script = python.bin / "maze"
    assert differences(lock, python) == []
    change(script)
    (found,) = differences(lock, python)
    assert found.startswith(f"{script} {said}")
    assert sync(lock, python.again()) == ("acme-maze 1.0.0",)
    done = subprocess.run([script], capture_output=True, text=True, check=True)
    assert done.stdout == "out of the maze\n"


PIPS = {
    "distlib": (
        "import re\nimport sys\nfrom acme.play import Game\nif __name__ == '__main__':\n"
        "    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])\n"
        "    sys.exit(Game.run())\n"
    ),
    "imports late": (
        "import re\nimport sys\nif __name__ == '__main__':\n    from acme.play import Game\n"
        "    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])\n"
        "    sys.exit(Game.run())\n"
    ),
    "without re": (
        "import sys\nfrom acme.play import Game\nif __name__ == '__main__':\n"
        "    if sys.argv[0].endswith('.exe'):\n        sys.argv[0] = sys.argv[0][:-4]\n"
        "    sys.exit(Game.run())\n"
    ),
}


@pytest.mark.parametrize("body", PIPS.values(), ids=PIPS)
@pytest.mark.parametrize("head", ["#!{}\n", "#!/bin/sh\n'''exec' \"{}\" \"$0\" \"$@\"\n' '''\n"])
def test_scripts_of_other_versions_of_pip_are_known(head: str, body: str, tmp_path: Path) -> None:
    python = TargetInterpreter.at()
    script = tmp_path / "maze"
    script.write_text(head.format(python.python) + body)
    assert script_fault(script, "acme.play:Game.run", python) == ""
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.stmt):
            line = " " * node.col_offset + "Game.run.__globals__.clear()"
            lines = body.splitlines()
            changed = "\n".join([*lines[: node.lineno - 1], line, *lines[node.lineno - 1 :]])
            script.write_text(head.format(python.python) + changed)
            assert script_fault(script, "acme.play:Game.run", python) != ""


def test_metadata_in_any_language(tmp_path: Path) -> None:
    head = "Metadata-Version: 2.1\nName: acme-maze\nVersion: 1.0.0\n"
    text = f"{head}Summary: Ein Irrgarten für Größere 迷宮\nLicense: © Ärger\n"
    wheel = read_wheel(make_wheel(tmp_path, files={f"{INFO}/METADATA": text}))
    assert (wheel.summary, wheel.licence) == ("Ein Irrgarten für Größere 迷宮", "© Ärger")
    for line, said in (
        ("Requires-Dist: größe>=1", "requires 'größe>=1', which cannot be read"),
        ("Name: größe", "by its METADATA"),
        ("Version: ①", "by its METADATA"),
    ):
        bad = "\n".join([line, *(x for x in text.splitlines() if x[:4] != line[:4])]) + "\n"
        with pytest.raises(RegistryError, match=said) as refused:
            read_wheel(make_wheel(tmp_path, files={f"{INFO}/METADATA": bad}))
        assert "\n" not in str(refused.value)


def test_nothing_is_signed_over_a_wheel_that_was_changed(scene: Scene, tmp_path: Path) -> None:
    scene.publish(make_wheel(tmp_path / "d"))
    scene.accept()
    (wheel,) = scene.tree.targets.rglob("*.whl")
    before, timestamp = wheel.read_bytes(), scene.tree.role_file("timestamp", 0).read_bytes()
    for change in (lambda: wheel.write_bytes(before[:-1] + b"x"), wheel.unlink):
        change()
        for sign in (
            scene.operator().refresh,
            scene.operator().refresh_targets,
            lambda: scene.add_owner("bolt"),
        ):
            with pytest.raises(RegistryError, match="restore the signed wheel"):
                sign()
        assert scene.tree.role_file("timestamp", 0).read_bytes() == timestamp
        (scene.folder / "bolt.key").unlink()
        (scene.folder / "bolt.key.pub").unlink(missing_ok=True)
    wheel.write_bytes(before)
    scene.operator().refresh()
