"""Read patches, apply them, and extract the agent's patch from a repository.

Takes: unified diffs, and an object with a sandbox's ``exec`` and ``write_file``. Gives: commands
and their results. Never: starts a process itself, or writes outside the sandbox.

A model's patch is applied as in the SWE-bench harness: three commands, each less strict than the
one before, on the tree that the one before left. So the last one can treat a patch that is already
applied as its own reverse, and undo it. A patch that git applies never gets that far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Protocol

from rollart_core.contracts.sandbox import ExecResult

MAX_PATCH_BYTES = 16 << 20
"""Requested maximum; the sandbox's own limit (``output_bytes``) can be lower."""

APPLIERS: tuple[tuple[str, ...], ...] = (
    ("git", "apply", "--verbose"),
    ("git", "apply", "--verbose", "--reject"),
    ("patch", "--batch", "--fuzz=5", "-p1", "-i"),
)

RUNNER_FILES = frozenset(
    (
        *("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pytest.toml", ".pytest.ini"),
        *(".pytest.toml", "sitecustomize.py", "usercustomize.py", "nose.cfg", ".noserc"),
        *("unittest.cfg", ".coveragerc", "pyvenv.cfg", "python._pth"),
    )
)
"""Files by which a patch could control the test runner instead of fixing the code."""

# The agent can change the repository's config: settings that would change a diff are overridden.
_GIT = ("git", "-c", "core.fileMode=false", "-c", "core.fsmonitor=false", "-c")
_GIT_READ = (*_GIT, "core.hooksPath=/dev/null", "-c", "core.quotePath=true", "-c", "diff.noprefix=")
_DIFF = ("diff", "--cached", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")


class Sandbox(Protocol):
    """The part of a sandbox that patches need."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a command."""

    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file."""


class PatchError(ValueError):
    """A patch that cannot be extracted from a repository, or not be applied to one."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file's part of a patch."""

    old: str | None
    """Its path before; None if the patch creates the file."""
    new: str | None
    """Its path after; None if the patch removes the file."""
    text: str
    is_binary: bool = False
    is_repository: bool = False
    """It names a commit of a nested repository, and has no content."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths it changes, without repeats."""
        return tuple(dict.fromkeys(path for path in (self.old, self.new) if path is not None))


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of applying a patch."""

    ok: bool
    how: str
    """The command that worked; ``empty`` if there was nothing to do; "" if none worked."""
    log: str = ""


def file_changes(patch: str) -> tuple[FileChange, ...]:
    """Return a patch file by file; the texts, joined, are the patch from its first file on."""
    changes = (_file_change(text) for text in _file_texts(patch))
    return tuple(change for change in changes if change.paths)


def touched_files(patch: str) -> tuple[str, ...]:
    """Return every path that a patch changes, in its order."""
    return tuple(dict.fromkeys(path for change in file_changes(patch) for path in change.paths))


def without_files(patch: str, leave_out: Callable[[str], bool]) -> str:
    """Return a patch without the files for which ``leave_out(path)`` is true.

    Use it for patches that git made (:func:`extract_patch`): in others, ``patch`` can find files in
    formats that are not read here, such as context diffs.
    """
    kept = (c for c in file_changes(patch) if not any(leave_out(path) for path in c.paths))
    return "".join(change.text for change in kept)


def steers_the_runner(path: str) -> bool:
    """Return whether a test runner reads or imports a file on its own.

    No gold patch of SWE-bench Lite changes such a file; its test patches can.
    """
    parts = PurePosixPath(path).parts
    return (
        parts[-1] in RUNNER_FILES
        or path.endswith((".pth", "._pth", ".pyc", ".pyo", ".egg-link"))
        or any(part.endswith((".egg-info", ".dist-info")) for part in parts)
        or "__pycache__" in parts
    )


async def apply_patch(
    sandbox: Sandbox, patch: str, *, repo_dir: str, patch_path: str, timeout_s: float = 60.0
) -> Applied:
    """Apply a patch with the first command that accepts it.

    Args:
        sandbox: The sandbox with the repository.
        patch: A unified diff; an empty one does nothing.
        repo_dir: The repository's folder in the sandbox.
        patch_path: Where to write the patch in the sandbox; outside the repository.
        timeout_s: Timeout of each command.
    """
    if not patch.strip():
        return Applied(True, "empty")
    if unsafe := [path for path in touched_files(patch) if _leaves_tree(path)]:
        return Applied(False, "", f"the patch touches {unsafe[0]!r}, outside the repository")
    text = patch if patch.endswith("\n") else patch + "\n"
    await sandbox.write_file(patch_path, text.encode("utf-8", "surrogateescape"))
    log = []
    for command in APPLIERS:
        result = await sandbox.exec((*command, patch_path), timeout_s=timeout_s, cwd=repo_dir)
        log.append(f"$ {' '.join(command)}\n{_said(result)}")
        if result.exit_code == 0 and not result.timed_out:
            return Applied(True, " ".join(command), "\n".join(log))
    return Applied(False, "", "\n".join(log))


async def extract_patch(
    sandbox: Sandbox, *, repo_dir: str, base: str, index_path: str, timeout_s: float = 60.0
) -> str:
    """Return the changes in a repository since ``base``, with new files but without binary ones.

    The repository's own index is not changed. Ignored files are left out, and so is a repository
    that the agent created inside it.

    Args:
        sandbox: The sandbox with the repository.
        repo_dir: The repository's folder in the sandbox.
        base: The commit to compare with.
        index_path: Where git can write a separate index; outside the repository.
        timeout_s: Timeout of each command.

    Raises:
        PatchError: If git failed, or the difference is larger than the sandbox's output limit.
    """
    result = ExecResult(0, b"", b"")
    for command in extract_commands(base):
        result = await sandbox.exec(
            command,
            timeout_s=timeout_s,
            cwd=repo_dir,
            env={"GIT_INDEX_FILE": index_path, "GIT_OPTIONAL_LOCKS": "0"},
            max_output_bytes=MAX_PATCH_BYTES,
        )
        if result.exit_code != 0 or result.timed_out:
            raise PatchError(f"{' '.join(command)} failed in {repo_dir}: {_said(result)[-500:]}")
    if result.truncated:
        num_bytes = len(result.stdout)
        raise PatchError(
            f"the changes in {repo_dir} are larger than the {num_bytes} bytes given back"
        )
    changes = file_changes(result.stdout.decode("utf-8", "surrogateescape"))
    return "".join(c.text for c in changes if not (c.is_binary or c.is_repository))


def extract_commands(base: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands of :func:`extract_patch`; the last one prints the difference."""
    return (
        (*_GIT_READ, "read-tree", base),
        (*_GIT_READ, "add", "--all", "."),
        (*_GIT_READ, *_DIFF, "--src-prefix=a/", "--dst-prefix=b/", base, "--"),
    )


def restore_commands(test_patch: str, base: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that restore a test patch's files to ``base``.

    Files that the test patch creates are removed, so that the agent's files do not replace them.
    """
    changes = file_changes(test_patch)
    old = dict.fromkeys(change.old for change in changes if change.old is not None)
    made = dict.fromkeys(path for c in changes for path in c.paths if path not in old)
    commands: list[tuple[str, ...]] = []
    if made:
        commands.append(("rm", "-rf", "--", *made))
    if old:
        commands.append(("git", "checkout", base, "--", *(path for path in old if path)))
    return tuple(commands)


def _file_texts(patch: str) -> list[str]:
    """Split a patch where a file begins: at ``diff --git``, or at ``---`` before ``+++``."""
    lines = _lines(patch)
    starts, old_left, new_left, has_head = [], 0, 0, False
    for number, line in enumerate(lines):
        if old_left > 0 or new_left > 0:  # inside a hunk nothing is a header
            old_left -= line[:1] in (" ", "-", "\n", "")
            new_left -= line[:1] in (" ", "+", "\n", "")
        elif hunk := _HUNK.match(line):
            old_left, new_left = int(hunk[1] or 1), int(hunk[2] or 1)
        elif line.startswith("diff --git "):
            starts.append(number)
            has_head = True
        elif line.startswith("--- ") and "".join(lines[number + 1 : number + 2])[:4] == "+++ ":
            if not has_head:
                starts.append(number)
            has_head = False
    return ["".join(lines[start:end]) for start, end in pairwise([*starts, len(lines)])]


_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def _lines(text: str) -> list[str]:
    """Split at newlines only: a carriage return or form feed belongs to its line."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _file_change(text: str) -> FileChange:
    head = re.split(r"^(?=@@ )", text, maxsplit=1, flags=re.MULTILINE)[0]
    old, new = _named(head, "--- "), _named(head, "+++ ")
    if old is None and new is None:  # a rename, an empty or a binary file
        old, new = _named(head, "rename from ", 0), _named(head, "rename to ", 0)
        if old is None and new is None:
            old = new = _git_path(head)
    is_new = "\nnew file mode " in head or "\n--- /dev/null" in f"\n{head}"
    is_gone = "\ndeleted file mode " in head or "\n+++ /dev/null" in head
    return FileChange(
        None if is_new else old,
        None if is_gone else new,
        text,
        is_binary="\nBinary files " in head or "\nGIT binary patch" in head,
        is_repository=re.search(r"^(new file mode|index \S+) 160000$", head, re.M) is not None,
    )


def _named(head: str, prefix: str, strip: int = 1) -> str | None:
    """Return the path on the line with a prefix, without ``strip`` leading folders (``a/``)."""
    found = re.search(rf"^{re.escape(prefix)}(.*)$", head, re.MULTILINE)
    path = _unquoted(found[1].split("\t")[0].rstrip("\r")) if found else "/dev/null"
    if path == "/dev/null":
        return None
    return path.split("/", strip)[-1] if strip else path


def _git_path(head: str) -> str | None:
    """Return the one path of ``diff --git a/PATH b/PATH``, which can contain spaces."""
    line = head.split("\n", 1)[0].removeprefix("diff --git ").rstrip("\r")
    if line.startswith('"'):
        return _unquoted(line[: line.index('" ') + 1])[2:] if '" ' in line else None
    half = (len(line) - 1) // 2
    same = line[:half].startswith("a/") and line[half + 1 :] == "b/" + line[2:half]
    return line[2:half] if same else None


def _unquoted(path: str) -> str:
    """Return an unquoted path; git writes unusual ones in quotes, with octal escapes."""
    if not (path.startswith('"') and path.endswith('"') and len(path) > 1):
        return path
    raw = path[1:-1].encode("utf-8", "surrogateescape").decode("latin-1")
    plain = re.sub(r"\\([0-7]{3}|.)", _unescaped, raw)
    return plain.encode("latin-1").decode("utf-8", "surrogateescape")


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) == 3:
        return chr(int(code, 8) & 0xFF)
    return dict(zip("abtnvfr", "\a\b\t\n\v\f\r", strict=True)).get(code, code)


def _leaves_tree(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return path.startswith("/") or ".." in parts or parts[:1] == (".git",)


def _said(result: ExecResult) -> str:
    note = "(out of time)\n" if result.timed_out else ""
    return note + (result.stdout + result.stderr).decode("utf-8", "replace")
