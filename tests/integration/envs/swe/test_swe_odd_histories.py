"""What making and mining do with odd histories; the runs of their suites are played."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from support.swe_repositories import git, write

from rollart_envs.swe.make import Baseline, Bounds, Works
from rollart_envs.swe.make_command import Made, MakeOrder, _make
from rollart_envs.swe.mine import Limits, MineOrder, Packages, Pit, _mine, _Sites, commits
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.reader import read_repair_tasks
from rollart_envs.swe.suite import Failed, FilesRefused, Suite, SuiteRun
from rollart_envs.swe.task_folder import TaskFolder
from rollart_sandboxes.pool.source import sandbox_source

Files = Mapping[str, bytes | None]
TEST = "def test_seen():\n    assert shelf.seen(1) == 2\n"


class Played:
    """A suite and its one checkout: ``shelf.py`` is right where its functions give what they do."""

    arguments = ()

    def __init__(self, source: str, refused: str = "") -> None:
        self._source = source
        self._refused = refused

    async def open(self, tree: bytes) -> Played:
        return self

    async def close(self) -> None:
        pass

    async def run(
        self, tests: Sequence[str] = (), *, files: Files | None = None, **settings: object
    ) -> SuiteRun:
        files = files or {}
        if self._refused in files:
            raise FilesRefused("its files cannot be put in: Is a directory")
        shelf: dict[str, object] = {}
        exec((files.get("shelf.py") or self._source.encode()).decode(), shelf)
        try:
            sees = shelf["seen"](1) == 2  # type: ignore[operator]
        except Exception:
            sees = False
        seen = "tests/test_shelf.py::test_seen"
        others = ("tests/test_shelf.py::test_unseen", "tests/test_shelf.py::test_a", "t.py::test_b")
        statuses = {**dict.fromkeys(others, "PASSED"), seen: "PASSED" if sees else "FAILED"}
        failures = {} if sees else {seen: Failed("AssertionError: seen(1) is not 2")}
        return SuiteRun(statuses, failures, {}, {}, {}, int(not sees))


async def good(row: object) -> str:
    return ""


def heard(what: str, share: float | None) -> None:
    pass


def expect_sound(made: Made, folder: TaskFolder, num_tasks: int) -> None:
    rows = read_repair_tasks(folder.tasks)
    assert rows.bad == ()
    assert made.num_tasks == len(rows.tasks) == num_tasks


def test_a_bug_that_comes_twice_is_one_task(tmp_path: Path) -> None:
    source = "def seen(x):\n    return x + 1\n\n\ndef unseen(x):\n    return max(x, 2)\n"
    package = tmp_path / "package"
    (package / "tests").mkdir(parents=True)
    (package / "shelf.py").write_text(source)
    (package / "tests" / "test_shelf.py").write_text(f"import shelf\n\n\n{TEST}")
    folder = TaskFolder(tmp_path / "tasks")
    folder.make()
    mirror = folder.mirror("shelf")
    suite = cast("Suite", Played(source))
    names = ("test_seen", "test_unseen", "test_a")
    passed = frozenset((*(f"tests/test_shelf.py::{name}" for name in names), "t.py::test_b"))
    callers = {
        ("shelf.py", 1): frozenset(("tests/test_shelf.py::test_seen",)),
        ("shelf.py", 5): frozenset(("tests/test_shelf.py::test_unseen",)),
    }
    works = Works(
        "shelf",
        "1.0",
        "shelf",
        mirror,
        mirror.commit_folder(package, "shelf 1.0"),
        suite,
        Baseline(passed, callers, (), 0.1),
        good,
        {"repo": "shelf"},
        Bounds(several=1.0),
    )
    first, other = (
        asyncio.run(_make(MakeOrder("shelf", folder, 99, seed, jobs=1), works, [], heard))
        for seed in (0, 1)
    )
    assert first.outcomes["made"] == other.outcomes["it is there already"] > 0
    expect_sound(first, folder, first.outcomes["made"])


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A fix, its revert, the fix again; its subject begins as git's own lines do."""
    folder = tmp_path / "shelf"
    (folder / "tests").mkdir(parents=True)
    git(folder, "init", "-q", "--initial-branch=main")
    begin = "def seen(x):\n    return x\n", "import shelf\n"
    fixed = "def seen(x):\n    return x + 1\n", f"import shelf\n\n\n{TEST}"
    subjects = ("Begin", "commit to one more", "Revert", "commit 0123456789abcdef again")
    for subject, (source, tests) in zip(subjects, (begin, fixed, begin, fixed), strict=True):
        (folder / "shelf.py").write_text(source)
        (folder / "tests" / "test_shelf.py").write_text(tests)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", subject)
    return folder


def mined(history: Path, out: Path, refused: str = "") -> tuple[Made, TaskFolder]:
    folder = TaskFolder(out)
    folder.make()
    mirror = Mirror.clone(str(history), folder.mirror_path("shelf"))
    suite = cast("Suite", Played("def seen(x):\n    return x\n", refused))
    pit = Pit("shelf", mirror, lambda commit: Packages(suite, {}), good, {"repo": "shelf"})
    head = mirror.git("rev-parse", "HEAD").strip()
    order = MineOrder(str(history), folder, count=9, jobs=1)
    return asyncio.run(_mine(order, pit, head, heard)), folder


def test_a_commit_is_imported_from_its_own_folder_with_the_version_that_a_build_writes(
    tmp_path: Path,
) -> None:
    """Its package is in ``src`` and imports its version; the newest commit moves it to the root."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    git(folder, "init", "-q", "--initial-branch=main")
    scm = '[project]\nname = "shelf"\n[tool.setuptools_scm]\nwrite_to = "{}shelf/_version.py"\n'
    own, tests = "src/shelf/__init__.py", "tests/test_shelf.py"
    begin = "from shelf._version import version\n\n\ndef seen(x):\n    return x\n"
    files: dict[str, str | None] = {"pyproject.toml": scm.format("src/"), own: begin}
    fixed = {own: begin + "    # at last\n", tests: "from shelf import seen\n"}
    moved = {own: None, "shelf/__init__.py": begin, "pyproject.toml": scm.format("")}
    for change in ({**files, tests: ""}, fixed, moved):
        write(folder, change)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "x")
    git(folder, "tag", "2.1", "HEAD~2")
    order = MineOrder(str(folder), TaskFolder(tmp_path / "out"), python_path=(tmp_path,))
    mirror = Mirror.clone(str(folder), order.folder.mirror_path("shelf"))
    sites = _Sites(order, "shelf", mirror, Suite(sandbox_source("bubblewrap"), ""), heard)
    (commit,) = commits(mirror, "HEAD", Limits())
    packages = sites.of(commit)
    assert packages.suite.source_path == ("src",)
    assert packages.fields["source_path"] == ["src"]
    (command,) = packages.fields["setup"]  # type: ignore[misc]
    assert "'2.1'" in str(command)
    assert str(command).endswith("> src/shelf/_version.py")
    assert b"version = __version__ = '2.1'" in packages.generated["src/shelf/_version.py"]
    head = replace(commit, parent=mirror.git("rev-parse", "HEAD").strip())
    assert sites.of(head).suite.source_path == (".",)
    assert set(sites.of(head).generated) == {"shelf/_version.py"}


def test_a_subject_may_begin_as_gits_own_lines_do(history: Path, tmp_path: Path) -> None:
    mirror = Mirror.clone(str(history), tmp_path / "shelf.git")
    subjects = [commit.subject for commit in commits(mirror, "HEAD", Limits())]
    assert subjects == ["commit 0123456789abcdef again", "Revert", "commit to one more"]


def test_a_commit_that_is_made_again_is_one_task(history: Path, tmp_path: Path) -> None:
    made, folder = mined(history, tmp_path / "tasks")
    assert made.outcomes["it is there already"] == 1
    expect_sound(made, folder, 1)


def test_a_commit_whose_files_are_refused_is_noted_and_left_out(
    history: Path, tmp_path: Path
) -> None:
    made, folder = mined(history, tmp_path / "tasks", refused="shelf.py")
    assert made.outcomes == {"its files cannot be put in: Is a directory": 3}
    assert not folder.tasks.exists()
