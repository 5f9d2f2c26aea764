"""A bare git repository with the trees of tasks.

Takes: folders, files, commits. Gives: commits that are the same on every machine, diffs, archives.
Never: reads the user's git settings, runs a hook, or leaves the index of an incomplete commit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from rollart_core.errors import UserError, first_line

_WHO: Final = ("RollArt", "tasks@rollart.invalid")
_WHEN: Final = "2020-01-01T00:00:00+0000"
_ENV: Final = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": _WHO[0],
    "GIT_AUTHOR_EMAIL": _WHO[1],
    "GIT_AUTHOR_DATE": _WHEN,
    "GIT_COMMITTER_NAME": _WHO[0],
    "GIT_COMMITTER_EMAIL": _WHO[1],
    "GIT_COMMITTER_DATE": _WHEN,
    "LC_ALL": "C.UTF-8",
}
_DIFF: Final = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index")
# The user's own folder can belong to another user, as in a container.
_SAFE: Final = ("-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null")
_BARE: Final = ("--template=",)
"""Do not copy sample hooks."""
_PREFIXES: Final = ("--src-prefix=a/", "--dst-prefix=b/")


class GitError(UserError):
    """A git command failed; the message has the command and git's output."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """A bare repository."""

    path: Path

    @classmethod
    def init(cls, path: Path) -> Mirror:
        """Return the repository at ``path``; it is created if it does not exist."""
        mirror = cls(path)
        if not (path / "HEAD").exists():
            path.mkdir(parents=True, exist_ok=True)
            _git("init", "-q", "--bare", *_BARE, "--initial-branch=main", str(path))
            mirror._take_all()
        return mirror

    @classmethod
    def clone(cls, source: str, path: Path) -> Mirror:
        """Return a copy of the repository at a folder or URL; an existing copy is updated.

        Raises:
            GitError: If the repository does not exist, or cannot be read.
        """
        if (path / "HEAD").exists():
            mirror = cls(path)
            mirror.git("fetch", "-q", "--prune", source, "+refs/heads/*:refs/heads/*")
            return mirror
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            _git("clone", "-q", "--bare", *_BARE, "--no-hardlinks", "--", source, str(part))
        except GitError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        mirror = cls(part)
        mirror._take_all()
        part.rename(path)
        return cls(path)

    @property
    def git_dir(self) -> Path:
        """The folder with its objects: of a working tree, ``.git``."""
        inner = self.path / ".git"
        return inner if inner.exists() else self.path

    def git(self, *arguments: str, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
        """Return the output of a git command in this repository."""
        given = stdin.encode("utf-8", "surrogateescape")
        said = _git("--git-dir", str(self.git_dir), *arguments, env=env, stdin=given)
        return said.decode("utf-8", "surrogateescape")

    def commit_folder(self, folder: Path, message: str) -> str:
        """Return a commit, without a parent, of all files in a folder."""
        with _index() as env:
            self.git("--work-tree", str(folder), "add", "--all", "--force", ".", env=env)
            return self._commit(self.git("write-tree", env=env).strip(), message)

    def commit_change(self, base: str, files: Mapping[str, bytes | None], message: str) -> str:
        """Return a commit, without a parent, of a commit's tree with some files changed."""
        with _index() as env:
            self.git("read-tree", base, env=env)
            lines = "".join(f"{self._entry(base, *item)}\0" for item in files.items())
            self.git("update-index", "-z", "--index-info", env=env, stdin=lines)
            return self._commit(self.git("write-tree", env=env).strip(), message)

    def commit_patched(self, base: str, patch: str, message: str) -> str:
        """Return a commit, without a parent, of a commit's tree with a patch applied.

        Raises:
            GitError: If it does not apply.
        """
        with _index() as env:
            self.git("read-tree", base, env=env)
            self.git("apply", "--cached", "--whitespace=nowarn", "-", env=env, stdin=patch)
            return self._commit(self.git("write-tree", env=env).strip(), message)

    def date(self, commit: str) -> datetime:
        """Return the date of a commit."""
        return datetime.fromtimestamp(int(self.git("log", "-1", "--format=%ct", commit)), UTC)

    def version(self, commit: str) -> str:
        """Return the version of the last tag before a commit; ``0`` if there is none."""
        try:
            tag = self.git("describe", "--tags", "--abbrev=0", "--match=*[0-9]*", commit).strip()
            return str(Version(re.sub(r"^[^0-9]+", "", tag)))
        except (GitError, InvalidVersion):
            return "0"

    def has(self, commit: str) -> bool:
        """Return whether a commit is in this repository."""
        try:
            self.git("cat-file", "-e", f"{commit}^{{commit}}")
        except GitError:
            return False
        return True

    def fetch_commits(self, source: Path, commits: Sequence[str]) -> None:
        """Copy commits of a repository on this machine, without their history."""
        serve = "git -c safe.directory=* -c uploadpack.allowAnySHA1InWant=true upload-pack"
        whole = [Mirror(source).git("rev-parse", f"{one}^{{commit}}").strip() for one in commits]
        names = dict.fromkeys(whole)
        self.git(
            *("fetch", "-q", "--depth", "1", "--no-tags", "--upload-pack", serve),
            *(f"file://{source.resolve()}", *(f"{one}:refs/bases/{one}" for one in names)),
        )

    def keep(self, name: str, commit: str) -> None:
        """Keep a commit permanently, under ``refs/tasks/``."""
        self.git("update-ref", f"refs/tasks/{name}", commit)

    def diff(self, old: str, new: str, paths: Sequence[str] = ()) -> str:
        """Return the difference of two commits as a patch."""
        limit = ("--", *paths) if paths else ()
        return self.git("diff-tree", "-p", "-r", *_DIFF, *_PREFIXES, old, new, *limit)

    def files(self, commit: str) -> tuple[str, ...]:
        """Return the paths in a commit."""
        return tuple(p for p in self.git("ls-tree", "-rz", "--name-only", commit).split("\0") if p)

    def read(self, commit: str, path: str) -> bytes | None:
        """Return a file of a commit; None if it does not exist."""
        try:
            return _git("--git-dir", str(self.git_dir), "cat-file", "blob", f"{commit}:{path}")
        except GitError:
            return None

    def archive(self, commit: str) -> bytes:
        """Return a commit's tree as a tar archive."""
        return _git("--git-dir", str(self.git_dir), "archive", "--format=tar", commit)

    def _take_all(self) -> None:
        """Override ``.gitattributes`` that leave files, mostly tests, out of archives."""
        path = self.path / "info" / "attributes"
        path.parent.mkdir(exist_ok=True)
        path.write_text("* -export-ignore -export-subst\n")

    def _commit(self, tree: str, message: str) -> str:
        return self.git("commit-tree", "-m", message, tree).strip()

    def _blob(self, content: bytes) -> str:
        command = ("--git-dir", str(self.git_dir), "hash-object", "-w", "--stdin")
        return _git(*command, stdin=content).decode().strip()

    def _entry(self, base: str, path: str, content: bytes | None) -> str:
        """Return the index entry of a file; None removes it."""
        if content is None:
            return f"0 {'0' * 40}\t{path}"
        before = self.git("ls-tree", base, "--", path).split()
        return f"{before[0] if before else '100644'} {self._blob(content)}\t{path}"


class _index:
    """A separate index for one commit."""

    def __enter__(self) -> dict[str, str]:
        self._folder = tempfile.TemporaryDirectory(prefix="rollart-index-")
        return {"GIT_INDEX_FILE": str(Path(self._folder.name) / "index")}

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()


def _git(*arguments: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> bytes:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ("git", *_SAFE, *arguments),
            input=stdin,
            capture_output=True,
            check=False,
            env={**kept, **_ENV, **(env or {})},
        )
    except FileNotFoundError:
        raise UserError("git is not installed: install the package git") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        asked = " ".join(a for a in arguments if not a.startswith("-"))
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise GitError(f"git {first_line(asked, 120)}: {reason}")
    return done.stdout
