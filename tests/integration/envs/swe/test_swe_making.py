"""Tasks made of a package and mined from a history, in boxes; nothing is fetched."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import typer
from support.sandbox_types import IN_DOCKER, no_bubblewrap, no_docker
from support.swe_history import STEPS, write

from rollart_core.errors import SandboxFailure, UserError
from rollart_core.plugins import registry
from rollart_core.rollout import loop
from rollart_envs.swe.benches import Benches, FailureCount, in_order
from rollart_envs.swe.cli import app
from rollart_envs.swe.make import Bounds
from rollart_envs.swe.make_command import Made, MakeOrder, make_tasks
from rollart_envs.swe.mine import Limits, MineOrder, commits, mine_tasks
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.package import fetch, unpack
from rollart_envs.swe.statement import leaked
from rollart_envs.swe.suite import Checkout, FilesRefused, Suite
from rollart_envs.swe.task_folder import TaskFolder
from rollart_envs.swe.validate import finish, judge_for
from rollart_sandboxes.pool.source import sandbox_source

BUBBLEWRAP: dict[str, object] = {"id": "bubblewrap"}
PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that a box can read, whoever owns it."""
    with tempfile.TemporaryDirectory(prefix="rollart-test-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def site(open_folder: Path) -> Path:
    """A copy of pytest and what it needs."""
    folder = open_folder / "site"
    folder.mkdir()
    for name in PYTEST:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        shutil.copytree(Path(found.origin).parent, folder / name)
        for metadata in Path(found.origin).parent.parent.glob(f"{name}-*.dist-info"):
            shutil.copytree(metadata, folder / metadata.name)
    shutil.copy(Path(pytest.__file__).parent.parent / "py.py", folder)
    return folder


@pytest.fixture(scope="module")
def history(open_folder: Path) -> Path:
    return write(open_folder / "shelf")


def rows(folder: TaskFolder) -> list[dict[str, object]]:
    return [json.loads(line) for line in folder.tasks.read_text().splitlines()]


def mined(
    history: Path, site: Path, out: Path, count: int, isolation: dict[str, object] = BUBBLEWRAP
) -> TaskFolder:
    sandboxes = sandbox_source(isolation)
    order = MineOrder(str(history), TaskFolder(out), count=count, python_path=(site,))
    finish(
        mine_tasks(order, sandboxes, judge_for(sandboxes, order.python), lambda what, share: None)
    )
    return order.folder


def made(package: Path, site: Path, out: Path, **options: object) -> tuple[Made, TaskFolder]:
    """Make tasks of a package whose needs are installed already."""
    folder = TaskFolder(out)
    if not folder.site("shelf-1.0").exists():
        shutil.copytree(site, folder.site("shelf-1.0"))
    sandboxes = sandbox_source("bubblewrap")
    order = MakeOrder(str(package), folder, **options)  # type: ignore[arg-type]
    work = make_tasks(
        order, sandboxes, judge_for(sandboxes, order.python), lambda what, share: None
    )
    return finish(work), folder


@pytest.fixture(scope="module")
def needs_bwrap() -> None:
    if why := no_bubblewrap():
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_history_gives_tasks_that_notify_of_behaviour(
    history: Path,
    site: Path,
    open_folder: Path,
    needs_bwrap: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = mined(history, site, open_folder / "mined", 3)
    found = rows(folder)
    assert len(found) == 3
    fix, wrap, _ = found
    assert fix["FAIL_TO_PASS"] == ["tests/test_text.py::test_wrap_counts_spaces"]
    assert "tests/test_text.py::test_wrap" in fix["PASS_TO_PASS"]  # type: ignore[operator]
    assert "text.wrap('aaa bbb', 6) == ['aaa', 'bbb']" in str(fix["problem_statement"])
    assert "has no attribute 'wrap'" in str(wrap["problem_statement"])
    for row in found:
        told = str(row["problem_statement"])
        assert not leaked(told, str(row["patch"]))
        assert not any(step.subject in told for step in STEPS if " " in step.subject)
        assert "tests/" not in str(row["patch"])
        assert "shelf/" not in str(row["test_patch"])
    again = mined(history, site, open_folder / "mined", 3)
    assert rows(again) == found
    moved = (open_folder / "mined").rename(open_folder / "moved")
    assert validated(moved / "tasks.jsonl", capsys) == (0, ["full none"] * 3)
    lost = {**fix, "instance_id": "lost", "base_commit": "0123456789"}
    wrong = {**fix, "instance_id": "wrong", "patch": wrap["patch"]}
    some = (fix, lost, wrong, {"repo": "shelf"})
    (moved / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    code, verdicts = validated(moved / "some.jsonl", capsys)
    assert code == 1
    assert verdicts == ["full none", "error error", "none none", "error error"]


@pytest.mark.docker
@pytest.mark.timeout(600)
def test_a_history_is_mined_in_containers(history: Path, site: Path, open_folder: Path) -> None:
    if why := no_docker():
        pytest.skip(why)
    isolation = {"id": "docker", **IN_DOCKER}
    (row,) = rows(mined(history, site, open_folder / "contained", 1, isolation))
    assert row["FAIL_TO_PASS"] == ["tests/test_text.py::test_wrap_counts_spaces"]


def validated(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """Run ``rollart swe validate`` and return its exit code, and gold and empty of each row."""
    capsys.readouterr()
    command = typer.main.get_command(app)
    code = command.main(["validate", str(file), "--json"], "rollart swe", standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    return code, [f"{row['gold']} {row['empty']}" for row in report["rows"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_is_played_where_it_was_made(
    history: Path, site: Path, open_folder: Path, needs_bwrap: None
) -> None:
    folder = mined(history, site, open_folder / "played", 1)
    env = registry.make("swe/Repair-v1", tasks=str(folder.tasks), sandbox="bubblewrap")
    try:
        env.reset(seed=0, options={"task": 0, "split": "train"})
        over, reward = False, 0.0
        while not over:
            action = env.oracle()
            assert action is not None
            _, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        assert reward == 1.0
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_package_gives_the_same_tasks_for_the_same_seed_also_in_two_goes(
    history: Path, site: Path, open_folder: Path, needs_bwrap: None
) -> None:
    once, folder = made(history, site, open_folder / "made", count=2, jobs=2)
    assert once.num_tasks == once.num_new == 2
    made(history, site, open_folder / "again", count=1, jobs=1)
    twice, again = made(history, site, open_folder / "again", count=2, jobs=1)
    assert twice.num_new == 1
    assert rows(folder) == rows(again)
    for row in rows(folder):
        assert not leaked(str(row["problem_statement"]), str(row["patch"]))
        assert row["FAIL_TO_PASS"]
        base = Mirror(folder.mirror_path("shelf-1.0")).read
        for test in row["FAIL_TO_PASS"]:  # type: ignore[attr-defined]
            path, name = str(test).split("[")[0].split("::", 1)
            kept = base(str(row["base_commit"]), path) or b""
            assert f"def {name.split('::')[-1]}(".encode() not in kept
    with pytest.raises(UserError, match="was started with another bounds"):
        made(history, site, open_folder / "made", count=4, bounds=Bounds(max_broken=0.1))


def test_a_package_whose_tests_are_missing_or_all_fail_is_refused(
    site: Path, open_folder: Path, needs_bwrap: None
) -> None:
    package = open_folder / "bare" / "shelf"
    (package / "shelf").mkdir(parents=True)
    (package / "PKG-INFO").write_text("Name: shelf\nVersion: 1.0\n")
    (package / "shelf" / "__init__.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="shelf: it has no tests"):
        made(package, site, open_folder / "refused")
    (package / "test_it.py").write_text("def test_it():\n    assert 1 == 2\n")
    with pytest.raises(UserError, match=r"none of its 1 tests passes: .*assert 1 == 2"):
        made(package, site, open_folder / "refused")
    (package / "test_it.py").write_text("import missing\n")
    with pytest.raises(UserError, match=r"none of its 0 tests passes: .*No module named 'missing'"):
        made(package, site, open_folder / "refused")


@pytest.mark.slow
def test_a_bug_that_hangs_or_ends_the_run_is_left_out(
    site: Path, open_folder: Path, needs_bwrap: None
) -> None:
    checkout_of = Suite(sandbox_source("bubblewrap"), "/usr/bin/python3", (site,))
    package = open_folder / "hangs" / "shelf"
    package.mkdir(parents=True)
    (package / "test_it.py").write_text("import time\ndef test_it():\n    time.sleep(60)\n")
    (package / "test_end.py").write_text("import os\ndef test_end():\n    os._exit(0)\n")
    mirror = Mirror.init(open_folder / "hangs.git")
    tree = mirror.archive(mirror.commit_folder(package, "tests"))

    async def runs() -> Sequence[object]:
        checkout = await checkout_of.open(tree)
        try:
            hangs = await checkout.run(["test_it.py"], timeout_s=3.0)
            ends = await checkout.run(["test_end.py"], timeout_s=30.0)
        finally:
            await checkout.close()
        return hangs.timed_out, hangs.exit_code, ends.timed_out, ends.exit_code

    assert loop.run(runs()) == (True, None, False, None)


def test_a_file_takes_the_place_of_a_folder_whose_files_go(
    site: Path, open_folder: Path, needs_bwrap: None
) -> None:
    tree = open_folder / "gives way"
    (tree / "x" / "deep").mkdir(parents=True)
    for path in ("x/a.txt", "x/deep/b.txt", "x/deep/c.txt"):
        (tree / path).write_text("there\n")
    (tree / "test_it.py").write_text(
        "import pathlib\n\n\ndef test_it():\n    assert pathlib.Path('x').read_text() == 'new'\n"
    )
    mirror = Mirror.init(open_folder / "gives way.git")
    archive = mirror.archive(mirror.commit_folder(tree, "tree"))
    suite = Suite(sandbox_source("bubblewrap"), "/usr/bin/python3", (site,))
    gone = dict.fromkeys(("x/a.txt", "x/deep/b.txt", "x/deep/c.txt"))

    async def runs() -> frozenset[str]:
        checkout = await suite.open(archive)
        try:
            run = await checkout.run(files={**gone, "x": b"new"}, timeout_s=30.0)
            with pytest.raises(FilesRefused, match="its files cannot be put in: "):
                await checkout.run(files={"x": b"new"}, timeout_s=30.0)
        finally:
            await checkout.close()
        return run.passed

    assert loop.run(runs()) == {"test_it.py::test_it"}


@pytest.mark.parametrize("option", ["--requires", "--pytest"])
@pytest.mark.parametrize("command", ["make", "mine"])
def test_an_option_with_an_open_quote_is_told_in_a_line(command: str, option: str) -> None:
    argv = [command, "x", "--sandbox", "process", "--set", "trusted=true", option, "'a"]
    with pytest.raises(UserError, match=rf"^{option} \"'a\": No closing quotation"):
        typer.main.get_command(app).main(argv, "swe", standalone_mode=False)


def test_commits_are_chosen_by_what_they_touch(history: Path, tmp_path: Path) -> None:
    mirror = Mirror.clone(str(history), tmp_path / "shelf.git")
    found = list(commits(mirror, "HEAD", Limits()))
    assert [commit.subject for commit in found] == [step.subject for step in reversed(STEPS)]
    assert found[0].source == ("shelf/text.py",)
    assert found[0].tests == found[0].test_files == ("tests/test_text.py",)
    few = list(commits(mirror, "HEAD", Limits(max_lines=2)))
    assert 0 < len(few) < len(found)


def test_a_mirror_makes_the_same_commits_anywhere(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / ".gitignore").write_text("*.txt\n")
    (tree / ".gitattributes").write_text("* export-ignore\n")
    (tree / "a.txt").write_bytes(b"one\r\n")
    script = tree / "sub" / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    bases = []
    for name in ("one", "two"):
        mirror = Mirror.init(tmp_path / f"{name}.git")
        commit = mirror.commit_folder(tree, "tree")
        gone = {"a.txt": None, "sub/run.sh": b"#!/bin/sh\nexit 1\n", "ü x.py": b""}
        bases.append((commit, mirror.commit_change(commit, gone, "change")))
        assert b"one\r\n" in mirror.archive(commit)
        assert mirror.read(bases[-1][1], "a.txt") is None
        assert "100755" in mirror.git("ls-tree", "-r", bases[-1][1], "sub/run.sh")
        assert "ü x.py" in mirror.files(bases[-1][1])
        assert "+exit 1" in mirror.diff(*bases[-1])
    assert bases[0] == bases[1]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("no/such/folder", "there is no such file or folder"),
        ("--upgrade", "neither a path nor the name of a package"),
        ("nothing.whl", "there is no such file or folder"),
    ],
)
def test_what_is_no_package_is_refused(named: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        fetch(named, tmp_path)


def test_what_cannot_be_unpacked_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="has no name"):
        unpack(empty, tmp_path / "out")
    for name in ("broken.whl", "broken.tar.gz"):
        (tmp_path / name).write_text("no archive")
        with pytest.raises(UserError, match=name):
            unpack(tmp_path / name, tmp_path / "out")


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path)
    progress = folder.progress("box", {"seed": 1})
    progress.note("0", "made")
    with (tmp_path / ".progress" / "box.jsonl").open("a") as file:
        file.write('{"candidate": "1", "outc')
    again = folder.progress("box", {"seed": 1})
    assert again.outcomes == {"0": "made"}
    again.note("1", "it hangs")
    assert folder.progress("box", {"seed": 1}).outcomes == {"0": "made", "1": "it hangs"}
    with pytest.raises(UserError, match="another seed"):
        folder.progress("box", {"seed": 2})


def test_what_fails_in_its_sandbox_is_left_out_but_not_four_times_in_a_row() -> None:
    failing = {2, 4, 5, 6, 7}

    async def told() -> list[str]:
        async def work(number: int) -> str:
            await asyncio.sleep(0.01 * (number % 3))
            return "its boxes fail" if number in failing else "made"

        count, seen = FailureCount(), []
        async for number, what in in_order(range(9), work, 3):
            count.take(what, number in failing)
            seen.append(f"{number} {what}")
        return seen

    with pytest.raises(SandboxFailure, match="four times in a row: its boxes fail"):
        asyncio.run(told())
    failing.remove(5)
    assert [line.split()[0] for line in asyncio.run(told())] == [str(n) for n in range(9)]


def test_a_sandbox_that_fails_is_replaced() -> None:
    opened: list[SimpleNamespace] = []

    async def open_one() -> Checkout:
        opened.append(SimpleNamespace(closed=False))

        async def close() -> None:
            opened[-1].closed = True

        opened[-1].close = close
        return cast("Checkout", opened[-1])

    async def tried(num_failures: int) -> int:
        benches, left = Benches(open_one), [num_failures]

        async def work(checkout: Checkout) -> int:
            left[0] -= 1
            if left[0] >= 0:
                raise SandboxFailure("the box is gone", boundary="sandbox")
            return left[0]

        try:
            return await benches.run(work)
        finally:
            await benches.close()

    assert asyncio.run(tried(2)) == -1
    with pytest.raises(SandboxFailure):
        asyncio.run(tried(3))
    assert len(opened) == 6
    assert all(sandbox.closed for sandbox in opened)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_bug_that_no_test_sees_is_no_part_of_a_task(
    site: Path, open_folder: Path, needs_bwrap: None
) -> None:
    package = open_folder / "pair" / "shelf"
    package.mkdir(parents=True)
    (package / "PKG-INFO").write_text("Name: shelf\nVersion: 1.0\n")
    (package / "shelf.py").write_text(
        "def seen(x):\n    return x + 1\n\n\ndef unseen(x):\n    return max(x, 2)\n"
    )
    (package / "test_it.py").write_text(
        "import shelf\n\n\ndef test_seen():\n    assert shelf.seen(1) == 2\n\n\n"
        "def test_unseen():\n    shelf.unseen(3)\n\n\ndef test_more():\n    assert shelf\n\n\n"
        "def test_most():\n    assert shelf\n"
    )
    out = open_folder / "pairs"
    _, folder = made(package, site, out, count=2, jobs=1, bounds=Bounds(several=1.0))
    for row in rows(folder):
        assert "return x + 1" in str(row["patch"])
        assert "+    return max" not in str(row["patch"])
        assert row["FAIL_TO_PASS"] == ["test_it.py::test_seen"]


def test_a_task_file_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    command = typer.main.get_command(app)
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(UserError, match=rf"{name}: there is no such file"):
            command.main(["validate", str(tmp_path / name)], "swe", standalone_mode=False)
