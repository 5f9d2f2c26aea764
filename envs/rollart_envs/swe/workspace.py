"""A task's repository in a sandbox.

Takes: a started sandbox, and the tree at the base commit. Gives: a :class:`Workspace`, a git
repository with one commit. Never: brings the repository's own history into the sandbox, or keeps
that of an image.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import SandboxFailure
from rollart_envs.swe.repository import CommittedTree, RepositoryTree, TaskFailure
from rollart_envs.swe.task import RepairTask
from rollart_sandboxes.pool.source import SandboxSource

ARCHIVE: Final = "base.tar.gz"
WORK_REPO: Final = "/work/repo"
"""Folder of a repository in most sandboxes."""
_UNPACK_S: Final = 300.0
IMAGE_REPO: Final = "/testbed"
_FROM_ARCHIVE: Final = """
set -e
mkdir repo
tar -xzf base.tar.gz -C repo
rm base.tar.gz
cd repo
"""
_FROM_COMMITTED: Final = """
set -e
tar -xpzof base.tar.gz
rm base.tar.gz
cd repo
pwd
"""
_PACKED: Final = "packed.tar.gz"
_PACK: Final = """
set -e
git -C repo repack -adq
tar -czf packed.tar.gz repo
"""
_FROM_IMAGE: Final = """
set -e
cd {folder}
rm -rf .git
"""
_SET_UP: Final = """
( PATH={path}$PATH; export PATH; set -e
{commands}
) >&2 || exit {code}
"""
_SET_UP_FAILED: Final = 98
_COMMIT: Final = """
git init -q .
git add --all --force .
git -c user.name=base -c user.email=base@localhost -c commit.gpgsign=false \
    commit -q --no-verify --allow-empty -m base
git rev-parse HEAD
pwd
"""
_DATE: Final = "2020-01-01T00:00:00Z"
"""Date of the commit, so that its hash depends only on the files."""
_IMAGE_OPTIONS: Final[Mapping[str, object]] = {"writable_root": True, "user": "0:0"}


@dataclass(frozen=True, slots=True)
class Workspace:
    """The location of a repository in a sandbox."""

    repo_dir: str
    base: str
    """The hash of its only commit."""
    scratch: str
    """A folder for files that are not part of it."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of a task in addition to its repository."""

    python: str
    """Absolute path in the sandbox; empty: the ``python3`` on its PATH."""
    python_path: tuple[str, ...] = ()
    """Folders with installed packages, readable in the sandbox."""
    source_path: tuple[str, ...] = ()
    """Folders of the repository to import its own packages from, such as ``src``."""
    python_home: str = ""
    """Folder with the interpreter, readable in the sandbox; empty: the sandbox has it."""
    setup: tuple[str, ...] = ()
    """Shell commands that prepare the repository before it is committed."""
    image_repo: str = IMAGE_REPO
    """Folder of the repository in the task's image."""

    @property
    def binds(self) -> tuple[str, ...]:
        """Folders of the host that the sandbox must be able to read."""
        return (*self.python_path, *filter(None, (self.python_home,)))

    @property
    def shell_path(self) -> str:
        """The start of PATH: the folder of the interpreter, with a colon."""
        return f"{PurePosixPath(self.python).parent}:" if self.python else ""

    def environ(self, repo_dir: str) -> Mapping[str, str]:
        """Return the environment variables for commands of a task."""
        own = [f"{repo_dir}/{path}" if path != "." else repo_dir for path in self.source_path]
        paths = ":".join((*own, *self.python_path))
        fixed = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        fixed |= {"LD_LIBRARY_PATH": f"{self.python_home}/lib"} if self.python_home else {}
        return {**fixed, "PYTHONPATH": paths} if paths else fixed


def needs_of(task: RepairTask, *, beside: Path | None, python: str) -> Needs:
    """Return the requirements in a row.

    Args:
        task: Its ``extra`` can have ``python`` (path in the sandbox, absolute or relative to
            ``beside``), ``python_path`` and ``python_home`` (folders of the host, likewise),
            ``source_path`` (folders of the repository), ``setup`` (shell commands) and
            ``image_repo``.
        beside: The folder of the task file.
        python: The Python that runs the tests if the row has none.

    Raises:
        TaskFailure: If a folder is missing, or a field has the wrong type.
    """
    folders = _folders(task, "python_path", beside)
    home = _folders(task, "python_home", beside)[:1]
    own = _texts(task, "source_path")
    if any(path.startswith("/") or ".." in path.split("/") for path in own):
        raise _failure(task, f"source_path: {list(own)} leaves the repository")
    named = str(task.extra.get("python") or "")
    return Needs(
        str((beside or Path()).resolve() / named) if "/" in named else python,
        folders,
        own,
        "".join(home),
        _texts(task, "setup"),
        str(task.extra.get("image_repo") or IMAGE_REPO),
    )


def sandbox_options(sandboxes: SandboxSource, task: RepairTask, needs: Needs) -> dict[str, object]:
    """Return the sandbox options of a task, in addition to those of the source."""
    options: dict[str, object] = {}
    if needs.binds:
        given = sandboxes.options.get("ro_binds", [])
        options["ro_binds"] = list(dict.fromkeys((*given, *needs.binds)))
    if task.image is not None:
        options.update(image=task.image, snapshot_paths=[needs.image_repo], **_IMAGE_OPTIONS)
    return options


async def unpack(
    sandbox: Sandbox, task: RepairTask, tree: RepositoryTree | None, needs: Needs
) -> Workspace:
    """Put a tree into a sandbox, or use the one of its image, set it up and commit it.

    The first sandbox of a tree gives the host a copy, which the next ones unpack. No agent and no
    patch have acted in it, and each sandbox has files of its own. Trees with set-up commands are
    not shared, because these can write elsewhere too.

    Raises:
        SandboxFailure: If the sandbox is gone, or has no disk space, no git or no tar.
        TaskFailure: If a set-up command of the task fails.
    """
    if tree is not None and tree.committed is not None and not needs.setup:
        return await _copied(sandbox, task, tree.committed)
    workspace = await _committed(sandbox, task, tree, needs)
    if tree is not None and not needs.setup and not tree.is_asked:
        tree.is_asked = True
        try:
            tree.committed = await _packed(sandbox, workspace)
        except BaseException:
            tree.is_asked = False
            raise
    return workspace


async def _committed(
    sandbox: Sandbox, task: RepairTask, tree: RepositoryTree | None, needs: Needs
) -> Workspace:
    """Unpack a tree, or use the one of the image, set it up and commit it."""
    if tree is not None:
        await sandbox.write_file(ARCHIVE, tree.archive)
    script = _FROM_IMAGE.format(folder=shlex.quote(needs.image_repo))
    script = (script if tree is None else _FROM_ARCHIVE) + _set_up(needs) + _COMMIT
    dates = {"GIT_AUTHOR_DATE": _DATE, "GIT_COMMITTER_DATE": _DATE}
    env = {**needs.environ(""), **dates} if needs.setup else dates
    base, repo_dir = await _lines(sandbox, task, script, env, 2)
    scratch = "/tmp" if tree is None else str(PurePosixPath(repo_dir).parent)
    return Workspace(repo_dir, base, scratch)


async def _copied(sandbox: Sandbox, task: RepairTask, kept: CommittedTree) -> Workspace:
    """Unpack a repository that another sandbox has committed."""
    await sandbox.write_file(ARCHIVE, kept.archive)
    (repo_dir,) = await _lines(sandbox, task, _FROM_COMMITTED, {}, 1)
    return Workspace(repo_dir, kept.base, str(PurePosixPath(repo_dir).parent))


async def _packed(sandbox: Sandbox, workspace: Workspace) -> CommittedTree | None:
    """Return a copy of the repository for other sandboxes; None if it cannot be read whole."""
    path = f"{workspace.scratch}/{_PACKED}"
    script = ("sh", "-c", _PACK)
    done = await sandbox.exec(script, timeout_s=_UNPACK_S, cwd=workspace.scratch)
    try:
        archive = await sandbox.read_file(path) if done.exit_code == 0 else b""
    except (OSError, ValueError):  # larger than the sandbox's limit
        archive = b""
    removed = await sandbox.exec(("rm", "-f", path), timeout_s=_UNPACK_S)
    if removed.exit_code != 0:
        raise SandboxFailure(f"{path} cannot be removed", boundary="swe.unpack")
    return CommittedTree(archive, workspace.base) if archive else None


async def _lines(
    sandbox: Sandbox, task: RepairTask, script: str, env: Mapping[str, str], count: int
) -> list[str]:
    """Run a script that unpacks a repository, and return the lines that it prints."""
    result = await sandbox.exec(("sh", "-c", script), timeout_s=_UNPACK_S, env=env)
    lines = result.stdout.decode(errors="replace").split()
    if result.exit_code == _SET_UP_FAILED:
        said = result.stderr.decode(errors="replace").strip()[-300:]
        raise _failure(task, f"a set-up command failed: {said}")
    if result.exit_code != 0 or result.timed_out or len(lines) != count:
        said = (result.stdout + result.stderr).decode(errors="replace").strip()[-300:]
        failure = SandboxFailure(
            f"{task.instance_id}: the repository could not be put into the sandbox, which needs git"
            f" and tar: {said}",
            boundary="swe.unpack",
        )
        failure.retryable = result.exit_code != 127  # no git in the image: use another image
        raise failure
    return lines


def _set_up(needs: Needs) -> str:
    """Return the part of the script that runs the set-up commands."""
    if not needs.setup:
        return ""
    path = shlex.quote(needs.shell_path) if needs.shell_path else ""
    return _SET_UP.format(path=path, commands="\n".join(needs.setup), code=_SET_UP_FAILED)


def _folders(task: RepairTask, name: str, beside: Path | None) -> tuple[str, ...]:
    """Return folders of the host in a row, as absolute paths."""
    folders = [(beside or Path()) / path for path in _texts(task, name)]
    for folder in folders:
        if not folder.is_dir():
            raise _failure(task, f"{name}: there is no folder {folder}")
    return tuple(str(folder.resolve()) for folder in folders)


def _texts(task: RepairTask, name: str) -> tuple[str, ...]:
    value = task.extra.get(name, ())
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise _failure(task, f"{name} is {value!r:.60}; it must be a list of texts")
    return tuple(str(item) for item in value)


def _failure(task: RepairTask, why: str) -> TaskFailure:
    return TaskFailure(f"{task.instance_id}: {why}", boundary="swe.task")
