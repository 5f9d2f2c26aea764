"""``rollart swe mine``: from a git repository to a folder of tasks.

Takes: what a person asked for. Gives: tasks in a :class:`TaskFolder`, one by one as they are found.
Never: begins anew what an interrupted run has tried already, or writes to the repository.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollart_core.errors import UserError
from rollart_envs.swe import package as packages
from rollart_envs.swe.make import MADE, Judge, Row
from rollart_envs.swe.make_command import PYTEST, Heard, Made
from rollart_envs.swe.mine import Limits, Pit, commits, mine
from rollart_envs.swe.mirror import GitError, Mirror
from rollart_envs.swe.suite import Suite
from rollart_envs.swe.task_folder import TaskFolder
from rollart_sandboxes.pool.source import SandboxSource


@dataclass(frozen=True, slots=True)
class MineOrder:
    """What a person asked for."""

    repo: str
    """A folder or URL."""
    folder: TaskFolder
    count: int = 10
    jobs: int = 2
    revision: str = "HEAD"
    """Where history ends."""
    name: str = ""
    """The repository's, for rows and statements; empty: as in its address."""
    requires: tuple[str, ...] = ()
    python_path: tuple[Path, ...] = ()
    """Folders with what the tests import; none: it is installed."""
    source_path: tuple[str, ...] = ()
    """Folders of the repository to import from; none: as its pyproject.toml has it."""
    pytest: tuple[str, ...] = ()
    python: str = ""
    """Absolute path in the box; empty: the ``python3`` on its PATH."""
    limits: Limits = field(default_factory=Limits)


async def mine_tasks(
    order: MineOrder, boxes: SandboxSource, judge_in: Callable[[TaskFolder], Judge], heard: Heard
) -> Made:
    """Mine a repository until there are enough tasks, or its history is at its end.

    Raises:
        UserError: There is no such repository, or no commit is worth a try.
        SandboxFailure: Boxes do not come up.
    """
    order.folder.make()
    name = name_of(order.name or order.repo)
    heard(f"reading {order.repo}", None)
    mirror = await asyncio.to_thread(_mirror, order, name)
    head = _head(mirror, order)
    python_path = await asyncio.to_thread(_python_path, order, name, mirror, head, heard)
    source_path = order.source_path or _source_path(mirror, head)
    fields: Row = {"repo": name, "python_path": python_path, "source_path": list(source_path)}
    fields |= {"python": order.python} if order.python else {}
    folders = tuple((order.folder.path / path).resolve() for path in python_path)
    suite = Suite(boxes, order.python, folders, source_path, (*PYTEST, *order.pytest))
    pit = Pit(name, mirror, suite, judge_in(order.folder), {**fields, "version": "0"})
    return await _mine(order, pit, head, heard)


def name_of(repo: str) -> str:
    """Return a repository's name: the last part of its address."""
    last = re.split(r"[/:]", repo.rstrip("/"))[-1] or Path(repo).resolve().name
    last = Path(repo).resolve().name if last in (".", "..") else last
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last.removesuffix(".git")).strip("-.") or "repository"


async def _mine(order: MineOrder, pit: Pit, head: str, heard: Heard) -> Made:
    worth = list(commits(pit.mirror, head, order.limits))
    if not worth:
        raise UserError(
            f"{order.repo}: no commit changes both Python source and test_*.py files within the"
            f" limits ({order.limits.max_files} files, {order.limits.max_lines} lines of source)"
        )
    progress = order.folder.progress(f"{pit.name}-mined", {"fields": pit.fields})
    there = set(order.folder.ids())
    num_before = num_made = sum(outcome == MADE for outcome in progress.outcomes.values())
    if num_made < order.count:
        results = mine(pit, iter(worth), order.jobs, dict(progress.outcomes))
        try:
            async for commit, outcome in results:
                what = outcome.what
                if outcome.row is not None and outcome.row["instance_id"] in there:
                    what = "it is there already"
                elif outcome.row is not None:
                    order.folder.add(outcome.row)
                    there.add(str(outcome.row["instance_id"]))
                    num_made += 1
                if outcome.is_final:
                    progress.note(commit.sha, what)
                tried = len(progress.outcomes)
                heard(
                    f"{pit.name}: {num_made} tasks of {tried} commits; {what}", tried / len(worth)
                )
                if num_made >= order.count:
                    break
        finally:
            await results.aclose()  # type: ignore[attr-defined]
    outcomes = dict(Counter(progress.outcomes.values()).most_common())
    return Made(pit.name, num_made, num_made - num_before, outcomes)


def _mirror(order: MineOrder, name: str) -> Mirror:
    path = Path(order.repo).expanduser()
    source = str(path.resolve()) if path.exists() else order.repo
    try:
        return Mirror.clone(source, order.folder.mirror_path(name))
    except GitError as error:
        raise UserError(f"{order.repo}: cannot be read as a git repository ({error})") from None


def _head(mirror: Mirror, order: MineOrder) -> str:
    try:
        return mirror.git("rev-parse", "--verify", f"{order.revision}^{{commit}}").strip()
    except GitError:
        raise UserError(f"{order.repo}: has no commit {order.revision!r}") from None


def _python_path(order: MineOrder, name: str, mirror: Mirror, head: str, heard: Heard) -> list[str]:
    """Return the folders with what the tests import, those in the task folder from there."""
    for folder in order.python_path:
        if not folder.is_dir():
            raise UserError(f"--python-path {folder}: there is no such folder")
    if order.python_path:
        return [str(folder.resolve()) for folder in order.python_path]
    site = order.folder.site(name)
    if not site.is_dir():
        with tempfile.TemporaryDirectory(prefix="rollart-mine-") as temporary:
            content = mirror.read(head, "pyproject.toml") or b""
            (Path(temporary) / "pyproject.toml").write_bytes(content)
            needed = packages.project_requirements(Path(temporary))
        heard(f"installing what {name} needs", None)
        part = site.with_name(site.name + ".part")
        what = f"{name}: pip could not install what it needs (give --requires or --python-path)"
        packages.install_into(part, [*needed, *order.requires], what=what)
        part.rename(site)
    return [f"site/{name}"]


def _source_path(mirror: Mirror, head: str) -> tuple[str, ...]:
    """Return the folders of a repository that hold its packages."""
    try:
        loaded = tomllib.loads((mirror.read(head, "pyproject.toml") or b"").decode())
        where = loaded["tool"]["setuptools"]["packages"]["find"]["where"]
    except (ValueError, KeyError, TypeError):
        where = []
    if isinstance(where, list) and where:
        return tuple(str(path) for path in where)
    return ("src",) if any(p.startswith("src/") for p in mirror.files(head)) else ()
