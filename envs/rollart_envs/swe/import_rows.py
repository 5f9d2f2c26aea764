"""``rollart swe import``: from rows of published data sets to a folder of tasks.

    row -> the fields of SWE-bench, and how to set it up -> its commit, from a mirror, or its image
        -> packages for its Python -> gold and empty patch -> tasks.jsonl, or the reason why not

Takes: the order of a user. Gives: tasks in a :class:`TaskFolder`, and the reason for each row that
cannot be run. Never: stops at a bad row, or runs code of a repository on the host, except the
builds of its packages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tarfile
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Final

from rollart_core.errors import SandboxFailure, UserError, first_line
from rollart_envs.rows import Row, RowError, read_rows
from rollart_envs.swe import environment
from rollart_envs.swe import package as packages
from rollart_envs.swe.benches import in_order, of_start
from rollart_envs.swe.harness import DJANGO, SYMPY, SetUp, set_up_of
from rollart_envs.swe.make_command import Heard
from rollart_envs.swe.mirror import GitError, Mirror
from rollart_envs.swe.official_rows import OfficialRow, official_row
from rollart_envs.swe.repository import repository_in
from rollart_envs.swe.runs import named_files, test_files
from rollart_envs.swe.task import RepairTask, repair_task
from rollart_envs.swe.task_folder import TaskFolder
from rollart_envs.swe.validate import Order, verdict_of
from rollart_sandboxes.pool.source import SandboxSource

REPORT: Final = "report.jsonl"


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """The order of a user."""

    file: Path
    folder: TaskFolder
    mirror: Path | None = None
    """Folder of git repositories; None: rows use their images."""
    only: tuple[str, ...] = ()
    """Patterns of ids and repositories; empty: all rows."""
    jobs: int = 2
    timeout_s: float | None = None
    has_images: bool = False
    """Whether the sandboxes are containers."""
    network: tuple[str, ...] = ()
    """Hosts that the sandboxes can reach."""
    is_validated: bool = True
    """Whether each row's gold and empty patch are judged first."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an order."""

    num_rows: int
    num_tasks: int
    """Rows that are in the folder now."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Id of a row that cannot be run, or its number -> the reason."""


class CannotRun(Exception):
    """A row that cannot be run; the message has the reason."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    found: OfficialRow | None
    why: str = ""

    @property
    def repo(self) -> str:
        return str(self.found.row.get("repo") or "") if self.found else ""


async def import_tasks(order: ImportOrder, sandboxes: SandboxSource, heard: Heard) -> Imported:
    """Import the rows of a file that are not in the folder yet.

    Raises:
        UserError: If the file cannot be read, or no row can be imported in this way.
        SandboxFailure: If sandboxes do not start.
    """
    if order.mirror is None and not order.has_images:
        raise UserError(
            "rows need their repositories or images: give --mirror DIR with git repositories, or"
            " --sandbox docker"
        )
    if order.mirror is not None and not order.mirror.is_dir():
        raise UserError(f"--mirror {order.mirror}: there is no such folder")
    order.folder.make()
    rows = await asyncio.to_thread(lambda: list(_candidates(order)))
    if not rows:
        raise UserError(f"{order.file}: no row matches {' '.join(order.only) or 'anything'}")
    there = order.folder.ids()
    site = _Sites(order, heard)
    fresh = [row for row in rows if row.name not in there]
    await asyncio.to_thread(site.fetch, fresh)
    why_not: dict[str, str] = {}
    results = in_order(fresh, partial(_tried, order, sandboxes, site), order.jobs)
    num = num_new = 0
    try:
        async for candidate, result in results:
            num += 1
            if isinstance(result, str):
                why_not[candidate.name] = result
            else:
                num_new += 1
                order.folder.add(result)
            said = f"; {candidate.name}: {result}" if isinstance(result, str) else ""
            heard(f"{order.file.name}: {num_new} of {num} imported{said}", num / len(fresh))
    finally:
        await results.aclose()  # type: ignore[attr-defined]
        _write_report(order.folder.path / REPORT, why_not)
    return Imported(len(rows), len(rows) - len(why_not), why_not)


def _candidates(order: ImportOrder) -> Iterator[_Candidate]:
    seen: set[str] = set()
    for number, row in read_rows(order.file):
        try:
            if isinstance(row, RowError):
                raise row
            name = str(row.get("instance_id") or "")
            found = official_row(row)
        except (RowError, KeyError, TypeError) as error:
            why = f"has no field {error}" if isinstance(error, KeyError) else str(error)
            name = "" if isinstance(row, RowError) else str(row.get("instance_id") or "")
            candidate = _Candidate(name or f"row {number}", None, first_line(why))
        else:
            candidate = _Candidate(str(found.row.get("instance_id") or f"row {number}"), found)
        if order.only and not any(
            fnmatchcase(text, pattern)
            for pattern in order.only
            for text in (candidate.name, candidate.repo)
        ):
            continue
        if candidate.name in seen:
            candidate = _Candidate(f"row {number}", None, f"{candidate.name} is in the file twice")
        seen.add(candidate.name)
        yield candidate


async def _tried(
    order: ImportOrder, sandboxes: SandboxSource, sites: _Sites, candidate: _Candidate
) -> Row | str:
    """Return a row that can be run, or the reason why it cannot."""
    if candidate.found is None:
        return candidate.why
    try:
        row = await asyncio.to_thread(sites.row, candidate.found)
        task = repair_task(row)
    except (CannotRun, RowError, UserError) as error:
        return first_line(str(error), 600)
    if not order.is_validated:
        return row
    judging = Order(sandboxes, order.folder.path, order.folder.repos, "", order.timeout_s)
    try:
        verdict = await verdict_of(judging, task)
    except SandboxFailure as failure:
        if of_start(failure) and task.image is None:
            raise
        return first_line(str(failure), 600)
    if not verdict.is_sound:
        return verdict.why
    statuses = {"gold_statuses": dict(verdict.gold_statuses)} if verdict.gold_statuses else {}
    return {**row, **statuses}


class _Sites:
    """The commits and packages of rows; each is made once."""

    def __init__(self, order: ImportOrder, heard: Heard) -> None:
        self._order = order
        self._heard = heard
        self._making = threading.Lock()
        self._made: dict[str, Row | str] = {}
        """Name of an environment -> the fields of its rows, or why it cannot be made."""

    def fetch(self, rows: list[_Candidate]) -> None:
        """Copy the base commits of rows from the mirror, those of a repository together."""
        wanted: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            if row.found is not None and self._source(row.repo) is not None:
                wanted[row.repo].append(str(row.found.row.get("base_commit") or ""))
        for repo, commits in wanted.items():
            self._heard(f"copying {repo}", None)
            source = self._source(repo)
            assert source is not None
            mirror = self._mirror(repo)
            known = [commit for commit in dict.fromkeys(commits) if Mirror(source).has(commit)]
            missing = [commit for commit in known if not mirror.has(commit)]
            if missing:
                mirror.fetch_commits(source, missing)

    def row(self, found: OfficialRow) -> Row:
        """Return a row that says where its repository, packages and tests are.

        Raises:
            CannotRun: If that cannot be had.
            RowError: If a field is wrong.
        """
        repo = _needed(found.row, "repo")
        source = self._source(repo)
        version = str(found.row.get("version") or "")
        set_up = found.set_up or set_up_of(repo, version)
        if source is None or set_up is None or set_up.why_not:
            if self._order.has_images and found.image and not found.bug:
                return self._of_image(found, set_up)
            raise CannotRun(self._why_not(found, source, version, set_up))
        if refused := [host for host in set_up.hosts if host not in self._order.network]:
            raise CannotRun(
                f"its tests call {' and '.join(refused)}, and sandboxes have no network: allow"
                f" it with --set 'network={json.dumps(list(set_up.hosts))}'"
            )
        row = dict(found.row)
        mirror = self._mirror(repo)
        if not mirror.has(_needed(row, "base_commit")):
            raise CannotRun(f"{source} has no commit {row['base_commit']}")
        if found.bug:
            row |= _with_bug(mirror, found)
        task = repair_task(row)
        row |= self._installed(task, Mirror(source), set_up)
        files = packages.version_files(partial(mirror.read, task.base_commit), f"{task.version}.0")
        if commands := [*packages.version_commands(files), *set_up.commands]:
            row["setup"] = commands
        mirror.keep(task.instance_id, task.base_commit)
        return {**row, "test_command": test_command(set_up, task)}

    def _of_image(self, found: OfficialRow, set_up: SetUp | None) -> Row:
        row = {**found.row, **found.image_fields, "image": found.image}
        command = test_command(set_up or SetUp(), repair_task(row))
        return {**row, "test_command": row.get("test_command") or command}

    def _why_not(
        self, found: OfficialRow, source: Path | None, version: str, set_up: SetUp | None
    ) -> str:
        repo = found.row["repo"]
        if self._order.mirror is None:
            return "its bug has to be put into a repository: give --mirror DIR"
        if source is None:
            return f"there is no repository {repo} in {self._order.mirror}"
        if not version:
            return "field 'version': is missing, and decides how the row is set up"
        if set_up is None:
            return (
                f"it is not known how to set up {repo} {version}: give the row an install_config,"
                " or use its image (--sandbox docker)"
            )
        return set_up.why_not

    def _source(self, repo: str) -> Path | None:
        return repository_in(self._order.mirror, repo) if self._order.mirror else None

    def _mirror(self, repo: str) -> Mirror:
        return self._order.folder.mirror(repo.replace("/", "__"))

    def _installed(self, task: RepairTask, source: Mirror, set_up: SetUp) -> Row:
        """Return the fields that select the packages of a row; they are installed if missing."""
        commit = task.environment_setup_commit or task.base_commit
        if not source.has(commit):
            commit = task.base_commit
        own, needed = commit, _own_requirements(source, task.base_commit)
        if needed and needed != _own_requirements(source, commit):
            own = task.base_commit
        parts = [task.repo, task.version, commit, repr(set_up), *(needed if own != commit else ())]
        mark = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
        name = f"{task.repo.replace('/', '__')}-{task.version}-{mark}"
        with self._making:
            if name not in self._made:
                self._heard(f"installing {task.repo} {task.version}", None)
                try:
                    self._made[name] = _install(
                        self._order.folder.site(name), task, source, (commit, own), set_up
                    )
                except UserError as error:
                    self._made[name] = str(error)
        made = self._made[name]
        if isinstance(made, str):
            raise CannotRun(made)
        return {**made, "python_path": [f"site/{name}"]}


def test_command(set_up: SetUp, task: RepairTask) -> str:
    """Return the command that runs the test files of a task."""
    files = test_files(task)
    command = set_up.test_command
    if command == DJANGO:
        names = (path.removeprefix("tests/").removesuffix(".py") for path in files)
        return " ".join((command, *(name.replace("/", ".") for name in names)))
    if command == SYMPY:
        return " ".join((command, *files))
    # Files of the test patch that no test is in, such as data in Python, are not collected.
    return " ".join((command, *(named_files(task) or files)))


test_command.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it as a test


def _own_requirements(source: Mirror, commit: str) -> list[str]:
    """Return the requirements of a commit's project."""
    with tempfile.TemporaryDirectory(prefix="rollart-import-") as folder:
        for name in ("pyproject.toml", "setup.cfg"):
            Path(folder, name).write_bytes(source.read(commit, name) or b"")
        return packages.project_requirements(Path(folder))


def _install(
    site: Path, task: RepairTask, source: Mirror, commits: tuple[str, str], set_up: SetUp
) -> Row:
    """Install the packages of a set-up; return the fields of rows that use them.

    Args:
        site: The folder.
        task: A task that uses them.
        source: Its repository.
        commits: The commit with the files of requirements, and that of the project itself.
        set_up: The set-up.
    """
    python = environment.interpreter(set_up.python)
    with tempfile.TemporaryDirectory(prefix="rollart-import-") as temporary:
        listed, root = (Path(temporary).resolve() / name for name in ("listed", "own"))
        for commit, folder in zip(commits, (listed, root), strict=True):
            with tarfile.open(fileobj=BytesIO(source.archive(commit))) as tar:
                tar.extractall(folder, filter="data")
        own = packages.project_requirements(root)
        source_path = set_up.source_path or _source_path(root)
        if not site.is_dir():
            environment.install_project(
                site,
                root,
                [r for r in _requirements(listed, set_up) if packages.agrees(r, own)],
                python=python,
                before=environment.as_of(source.date(commits[0]), set_up.python),
                extras=set_up.extras,
                name=task.repo.rpartition("/")[2],
                version=f"{task.version}.0",
            )
    return {**python.placed(site.parents[1]), "source_path": list(source_path)}


def _source_path(root: Path) -> tuple[str, ...]:
    has_packages = any(path.is_dir() for path in root.glob("src/*"))
    return ("src",) if has_packages else (".",)


def _requirements(root: Path, set_up: SetUp) -> Iterator[str]:
    pinned = {packages.name_of(line) for line in set_up.requires}
    skipped = {*pinned, *set_up.without}
    for path in set_up.files:
        for line in packages.requirement_lines(root / path):
            if packages.name_of(line) not in skipped:
                yield line
    if "setuptools" not in pinned:  # new environments of pip and conda have it
        yield "setuptools"
    yield from set_up.requires


def _with_bug(mirror: Mirror, found: OfficialRow) -> Row:
    """Return the commit, patches and id of a row whose bug is not in its base commit.

    The tests that detect the bug are removed from the commit; ``test_patch`` restores them.
    """
    base = _needed(found.row, "base_commit")
    try:
        buggy = mirror.commit_patched(base, found.bug, "base")
    except GitError as error:
        raise CannotRun(f"its bug does not apply to {base}: {error}") from None
    tests = {"FAIL_TO_PASS": found.row.get("FAIL_TO_PASS")}
    stub = {**found.row, **tests, "patch": found.bug, "test_patch": found.bug}
    hidden = dict.fromkeys(named_files(repair_task({**stub, "PASS_TO_PASS": []})))
    without = mirror.commit_change(buggy, hidden, "base")
    return {
        "base_commit": without,
        "environment_setup_commit": base,
        "patch": mirror.diff(buggy, base),
        "test_patch": mirror.diff(without, buggy),
    }


def _needed(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise RowError(name, "is missing")
    return value


def _write_report(path: Path, why_not: Mapping[str, str]) -> None:
    lines = [json.dumps({"instance_id": name, "why": why}) for name, why in why_not.items()]
    part = path.with_name(path.name + ".part")
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(part, path)
