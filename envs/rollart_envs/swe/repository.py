"""Repositories of tasks: the tree at the base commit, exported on the host.

Takes: a task, and the folder with git mirrors or unpacked packages. Gives: a
:class:`RepositoryTree`, an archive of files without history. Never: runs a repository's hooks,
filters or attributes, writes to a mirror, or lets history out: the fix is in it.

A mirror of ``owner/name`` is looked up as ``owner__name``, ``owner/name`` and ``name``, bare or
not, with or without ``.git``. A folder that is not a git repository is used unchanged. A row can
contain its files (``files``: path -> text), and a row with an ``image`` needs no mirror: its
repository is in the image.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

from rollart_core.errors import EnvironmentFailure
from rollart_envs.swe.task import RepairTask

_GIT: Final = ("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false")
_ENV: Final = {
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
}
_MTIME: Final = 1_577_836_800
"""2020-01-01, for every file: zip files cannot store dates before 1980."""
_SKIPPED: Final = (".git", "__pycache__")
_MAX_KEPT: Final = 4
_exporting = threading.Lock()


class TaskFailure(EnvironmentFailure):
    """A task that cannot be played or judged; the message names it. A retry cannot help."""

    retryable = False


@dataclass(slots=True)
class RepositoryTree:
    """The files of a repository at one commit."""

    archive: bytes
    """A ``.tar.gz``."""
    committed: CommittedTree | None = field(default=None, compare=False)
    """The same as a git repository; None until one sandbox has made it."""
    is_asked: bool = field(default=False, compare=False)
    """Whether a sandbox makes it now, or could not."""


@dataclass(frozen=True, slots=True)
class CommittedTree:
    """A tree that was committed in a sandbox, before anything else ran there."""

    archive: bytes
    """A ``.tar.gz`` of the repository, with ``.git``."""
    base: str
    """The hash of its only commit."""


def base_tree(task: RepairTask, repos_dir: Path | None) -> RepositoryTree | None:
    """Return a task's tree at its base commit; it blocks while git runs.

    Returns:
        None if the tree is in the task's image.

    Raises:
        TaskFailure: If the repository or commit does not exist, or cannot be read.
    """
    files = task.extra.get("files")
    if files is not None:
        return _of_row(task, files)
    folder = repository_in(repos_dir, task.repo) if repos_dir is not None else None
    if folder is None:
        if task.image is not None:
            return None
        where = f"in {repos_dir}" if repos_dir is not None else "at hand: give repos_dir"
        looked = ", ".join(_names(task.repo)) or "nothing: it is no name of a repository"
        raise _failure(task, f"no repository {task.repo!r} {where}; looked for {looked}")
    try:
        with _exporting:  # many episodes of one task start together; one export serves them
            if not _is_git(folder):
                return _of_folder(folder)
            return _of_commit(folder, _commit(task, folder))
    except OSError as error:
        raise _failure(task, f"{folder} cannot be read: {error}") from error


def repository_in(folder: Path, repo: str) -> Path | None:
    """Return the folder of a repository among others; None if there is none."""
    return next((folder / name for name in _names(repo) if (folder / name).is_dir()), None)


def _names(repo: str) -> tuple[str, ...]:
    """Return the names that the folder of a repository can have."""
    parts = PurePosixPath(repo).parts
    if not parts or ".." in parts or repo.startswith("/"):
        return ()
    names = dict.fromkeys(("__".join(parts), "/".join(parts), parts[-1]))
    return tuple(f"{name}{end}" for name in names for end in ("", ".git"))


def _commit(task: RepairTask, folder: Path) -> str:
    done = _git(folder, "rev-parse", "--verify", "--quiet", f"{task.base_commit}^{{commit}}")
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = f" ({said[-1]})" if said else ""
        raise _failure(task, f"no commit {task.base_commit} in {folder}{why}")
    return done.stdout.decode().strip()


@lru_cache(maxsize=_MAX_KEPT)
def _of_commit(folder: Path, commit: str) -> RepositoryTree:
    listed = _checked(_git(folder, "ls-tree", "-r", "-z", "--full-tree", commit)).split(b"\0")
    entries = [_entry(line) for line in listed if line]
    files = [(path, mode, sha) for mode, kind, sha, path in entries if kind == "blob"]
    blobs = _blobs(folder, [sha for *_, sha in files])
    return _packed((path, mode, blob) for (path, mode, _), blob in zip(files, blobs, strict=True))


def _entry(line: bytes) -> tuple[str, str, str, str]:
    """Return mode, kind, hash and path of a line of ``ls-tree``."""
    head, _, path = line.partition(b"\t")
    mode, kind, sha = head.decode().split()
    return mode, kind, sha, os.fsdecode(path)


def _blobs(folder: Path, shas: list[str]) -> Iterator[bytes]:
    said = _checked(_git(folder, "cat-file", "--batch", stdin="".join(f"{s}\n" for s in shas)))
    reader = io.BytesIO(said)
    for sha in shas:
        head = reader.readline().split()
        if len(head) != 3:
            raise OSError(f"{folder}: the object {sha} is missing")
        yield reader.read(int(head[2]))
        reader.read(1)


def _of_row(task: RepairTask, files: object) -> RepositoryTree:
    if not isinstance(files, Mapping) or not files:
        raise _failure(task, "files has to map paths to texts")
    for path, text in files.items():
        if not isinstance(text, str) or path.startswith("/") or ".." in path.split("/"):
            raise _failure(task, f"files: {path!r} is no path of the repository with its text")
    try:
        return _packed((path, "100644", text.encode()) for path, text in files.items())
    except UnicodeEncodeError as error:
        raise _failure(task, f"files: a path or text is no UTF-8: {error}") from None


def _of_folder(folder: Path) -> RepositoryTree:
    return _packed(_walked(folder))


def _walked(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted((*names, *links)):
            path = os.path.join(parent, name)
            relative = os.path.relpath(path, folder)
            if os.path.islink(path):
                yield relative, "120000", os.fsencode(os.readlink(path))
            elif os.path.isfile(path):
                mode = "100755" if os.access(path, os.X_OK) else "100644"
                yield relative, mode, Path(path).read_bytes()


def _packed(files: Iterator[tuple[str, str, bytes]]) -> RepositoryTree:
    """Return an archive of (path, git's mode, content)."""
    held = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=held, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, mode, content in files:
            info = tarfile.TarInfo(path)
            info.mtime, info.mode = _MTIME, 0o755 if mode == "100755" else 0o644
            if mode == "120000":
                info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(content)
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return RepositoryTree(held.getvalue())


def _is_git(folder: Path) -> bool:
    return (folder / ".git").exists() or (
        (folder / "HEAD").is_file() and (folder / "objects").is_dir()
    )


def _git(folder: Path, *args: str, stdin: str = "") -> subprocess.CompletedProcess[bytes]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        (*_GIT, "-C", str(folder), *args),
        input=stdin.encode(),
        capture_output=True,
        env={**environ, **_ENV},
        check=False,
    )


def _checked(done: subprocess.CompletedProcess[bytes]) -> bytes:
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-300:]
        raise OSError(f"{' '.join(map(str, done.args[-3:]))} failed: {said}")
    return done.stdout


def _failure(task: RepairTask, why: str) -> TaskFailure:
    return TaskFailure(f"{task.instance_id}: {why}", boundary="swe.repository")
