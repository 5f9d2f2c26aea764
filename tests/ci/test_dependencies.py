"""The cache of dependencies: an entry is built once, and attached to each clone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import dependencies
import pytest


def test_two_clones_at_once_share_one_build(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = repo_root / ".ci" / "dependencies.py"
    environment = {
        **os.environ,
        "ROLLART_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(_package(tmp_path)),
    }
    clones = [tmp_path / name / ".venv" for name in ("one", "two")]
    for clone in clones:
        clone.parent.mkdir()
    command = [sys.executable, program, "venv", "--without-project"]
    asked = [
        subprocess.Popen(
            [*command, clone, "made-here==1.0"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for clone in clones
    ]
    said = [process.communicate()[1] for process in asked]
    assert [process.returncode for process in asked] == [0, 0], said
    assert sum("building" in one for one in said) == 1
    entries = [p for p in (tmp_path / "cache" / "dependencies").iterdir() if p.is_dir()]
    assert len(entries) == 1
    for clone in clones:
        script = clone / "bin" / "made-here"
        assert subprocess.check_output([script], text=True).split() == [
            "1.0",
            str(clone / "bin" / "python"),
        ]
        module = next(clone.glob("lib/*/site-packages/made_here.py"))
        assert module.stat().st_nlink == 3  # the entry's, and each clone's
        assert not (clone / dependencies.ORIGIN).exists()


def _package(folder: Path) -> Path:
    """Make a wheel with a script, without anything that would have to be fetched."""
    import zipfile

    wheels = folder / "wheels"
    wheels.mkdir()
    info = "made_here-1.0.dist-info"
    files = {
        "made_here.py": "import sys\ndef main():\n    print('1.0', sys.executable)\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: made-here\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nmade-here = made_here:main\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheels / "made_here-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return wheels


def test_a_build_that_failed_leaves_no_entry(tmp_path: Path) -> None:
    def build(part: Path) -> None:
        (part / "half").touch()
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        dependencies.entry(tmp_path, "venv-1", build)
    assert not (tmp_path / "venv-1").exists()
    made = dependencies.entry(tmp_path, "venv-1", lambda part: (part / "whole").touch())
    assert sorted(p.name for p in made.iterdir()) == [dependencies.ORIGIN, "whole"]


def test_what_nobody_asked_for_in_a_month_is_removed_by_the_next_build(tmp_path: Path) -> None:
    for name in ("venv-old", "venv-new"):
        dependencies.entry(tmp_path, name, lambda part: None)
    before = time.time() - (dependencies.KEPT_DAYS + 1) * 86_400
    os.utime(tmp_path / "venv-old" / dependencies.ORIGIN, (before, before))
    dependencies.entry(tmp_path, "venv-next", lambda part: None)
    assert sorted(p.name for p in tmp_path.glob("venv-*") if p.is_dir()) == [
        "venv-new",
        "venv-next",
    ]


def test_a_change_in_a_clone_does_not_reach_the_entry(tmp_path: Path) -> None:
    def build(part: Path) -> None:
        (part / "bin").mkdir()
        (part / "bin" / "tool").write_text(f"#!{part}/bin/python\n")

    made = dependencies.entry(tmp_path / "cache", "venv-1", build)
    dependencies.attach(tmp_path / "clone", made, executables="bin")
    assert (tmp_path / "clone/bin/tool").read_text() == f"#!{tmp_path}/clone/bin/python\n"
    assert (made / "bin/tool").read_text() == f"#!{tmp_path}/cache/venv-1.part/bin/python\n"


def test_keys_notify_requirements_apart() -> None:
    keys = {dependencies.key_of("venv", *given) for given in ((["a"],), (["b"],), (["a"], "x"))}
    assert len(keys) == 3


def test_an_extra_that_there_is_none_of_is_refused(repo_root: Path) -> None:
    with pytest.raises(SystemExit, match="no extra 'trian'"):
        dependencies.requirements_of(repo_root, ["trian"], base=False)
