"""A folder of tasks: the rows, and the files that they need.

    tasks.jsonl          one row per task
    repos/NAME.git       the repositories, by the rows' ``repo``
    site/NAME/           the tests' imports; ``python_path`` of rows is relative to the folder
    .progress/*.jsonl    the candidates that were tried, so that a command can be resumed

Takes: rows. Gives: the same rows again. Never: leaves an incomplete row in a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from rollart_core.errors import UserError
from rollart_envs.swe.mirror import Mirror

TASKS_NAME = "tasks.jsonl"
_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A folder of tasks; it does not have to exist yet."""

    path: Path

    @property
    def tasks(self) -> Path:
        """The file of rows."""
        return self.path / TASKS_NAME

    @property
    def repos(self) -> Path:
        """The folder of repositories."""
        return self.path / "repos"

    def mirror_path(self, name: str) -> Path:
        """Return the path of a repository."""
        return self.repos / f"{name}.git"

    def mirror(self, name: str) -> Mirror:
        """Return a repository; it is created if it does not exist."""
        return Mirror.init(self.mirror_path(name))

    def site(self, slug: str) -> Path:
        """Return the folder to install the tests' imports in."""
        return self.path / "site" / slug

    def make(self) -> None:
        """Create the folder.

        Raises:
            UserError: If it cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; use another --out") from None

    def ids(self) -> frozenset[str]:
        """Return the ids of the tasks in the folder."""
        return frozenset(str(row.get("instance_id")) for row in self.rows())

    def rows(self) -> Iterator[Mapping[str, object]]:
        """Yield the tasks in the folder."""
        return _lines(self.tasks)

    def add(self, row: Mapping[str, object]) -> None:
        """Add a task."""
        _append(self.tasks, row)

    def progress(self, name: str, settings: Mapping[str, object]) -> Progress:
        """Return the candidates that were tried under a name with these settings.

        Raises:
            UserError: If it was started with other settings.
        """
        return Progress(self.path / ".progress" / f"{name}.jsonl", settings)


class Progress:
    """The outcome of each candidate, in a file."""

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self._path = path
        lines = iter(_lines(path))
        first, tried = next(lines, None), list(lines)
        told = json.loads(json.dumps(settings))
        if first is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, told)
        elif first != told:
            changed = ", ".join(sorted(k for k in told if told[k] != first.get(k)))
            raise UserError(
                f"{path.parent.parent}: was started with another {changed or 'version'}; use the"
                f" same to continue, or another --out (or remove {path})"
            )
        self.outcomes = {str(line["candidate"]): str(line["outcome"]) for line in tried}
        """Candidate -> its outcome."""

    def note(self, candidate: str, outcome: str) -> None:
        """Record the outcome of a candidate."""
        self.outcomes[candidate] = outcome
        _append(self._path, {"candidate": candidate, "outcome": outcome})


def _append(path: Path, row: Mapping[str, object]) -> None:
    """Append a whole line or nothing; the incomplete line of a killed command is removed."""
    line = json.dumps(row).encode() + b"\n"
    try:
        with path.open("a+b") as file:
            size = _whole_lines(file)
            file.truncate(size)
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _whole_lines(file: BinaryIO) -> int:
    """Return the number of bytes of a file that are whole lines."""
    size = file.seek(0, os.SEEK_END)
    while size:
        file.seek(max(0, size - _BLOCK))
        block = file.read(size - file.tell())
        if (at := block.rfind(b"\n")) >= 0:
            return size - len(block) + at + 1
        size -= len(block)
    return 0


def _lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the objects of a JSON lines file; a line that was cut short is skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
