"""Repository-level repair tasks, in SWE-bench's format.

Takes: one row, from JSON or Parquet. Gives: a :class:`RepairTask`. Never: reads a file, or accepts
a row with invalid test ids, commit or patches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart_envs.rows import RowError
from rollart_envs.swe.logs import Status

_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")
_IMAGES = ("image", "docker_image", "image_name")
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Halves of surrogate pairs, except those that represent bytes (``surrogateescape``)."""


@dataclass(frozen=True, slots=True)
class RepairTask:
    """One issue of a repository, with the tests that decide whether it is fixed."""

    instance_id: str
    repo: str
    """``owner/name``, or the name of a package."""
    base_commit: str
    problem_statement: str
    patch: str
    """The gold patch."""
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    hints_text: str = ""
    version: str = ""
    environment_setup_commit: str = ""
    created_at: str = ""
    image: str | None = None
    """The container image with the repository, if the row has one."""
    test_command: str | None = None
    """The shell command that runs its tests, if the row has one."""
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Fields that are not part of the format, unchanged."""

    def secrets(self) -> tuple[str, ...]:
        """Return the texts that the agent must never read: the gold patch and the test patch."""
        return tuple(text for text in (self.patch, self.test_patch) if text.strip())


def repair_task(row: Mapping[str, object]) -> RepairTask:
    """Return the task in a row.

    Raises:
        RowError: If a field is missing, empty or of the wrong type.
    """
    fail_to_pass = test_ids(row, "FAIL_TO_PASS")
    if not fail_to_pass:
        raise RowError("FAIL_TO_PASS", "is empty; at least one test must fail before the repair")
    return RepairTask(
        instance_id=_needed(row, "instance_id"),
        repo=_needed(row, "repo"),
        base_commit=_commit(row),
        problem_statement=_needed(row, "problem_statement"),
        patch=_diff(row, "patch"),
        test_patch=_diff(row, "test_patch"),
        fail_to_pass=fail_to_pass,
        pass_to_pass=test_ids(row, "PASS_TO_PASS"),
        hints_text=_text(row, "hints_text"),
        version=_text(row, "version"),
        environment_setup_commit=_text(row, "environment_setup_commit"),
        created_at=_text(row, "created_at"),
        image=next((text for name in _IMAGES if (text := _text(row, name))), None),
        test_command=_test_command(row),
        extra={key: value for key, value in row.items() if key not in _KNOWN},
    )


def gold_statuses(task: RepairTask) -> Mapping[str, Status]:
    """Return the tests that end as XFAIL or XPASS with the gold patch, as the row records them."""
    found = task.extra.get("gold_statuses") or {}
    if isinstance(found, str):
        found = json.loads(found)
    if not isinstance(found, Mapping):
        return {}
    return {test: status for test, status in found.items() if status in ("XFAIL", "XPASS")}


def test_ids(row: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return a field with test ids: a list, or a list as a JSON string."""
    value = _present(row, name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(name, f"is a text, but not a JSON list: {error}") from None
    if not isinstance(value, list | tuple):
        raise RowError(name, f"is a {type(value).__name__}; it must be a list of test ids")
    for position, test in enumerate(value):
        if not isinstance(test, str) or not test.strip():
            raise RowError(name, f"has {test!r} at position {position}; it must be a test id")
        _expect_argument(name, test)
    return tuple(dict.fromkeys(value))


test_ids.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it as a test


def _present(row: Mapping[str, object], name: str) -> object:
    if row.get(name) is None:
        raise RowError(name, "is missing")
    return row[name]


def _text(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(name, f"is a {type(value).__name__}; it must be a text")
    if half := _HALF.search(value):
        raise RowError(name, f"has {half[0]!a}, which cannot be encoded as text")
    return value


def _needed(row: Mapping[str, object], name: str) -> str:
    _present(row, name)
    text = _text(row, name)
    if not text.strip():
        raise RowError(name, "is empty")
    return text


def _commit(row: Mapping[str, object]) -> str:
    commit = _needed(row, "base_commit")
    if not _COMMIT.fullmatch(commit):
        # It is passed to git, which would read a leading dash as an option.
        raise RowError("base_commit", f"is {commit[:60]!r}; it must be a commit's hex digits")
    return commit


def _diff(row: Mapping[str, object], name: str) -> str:
    text = _needed(row, name)
    if "\n+++ " not in f"\n{text}" and "diff --git " not in text:
        raise RowError(name, f"begins with {text[:40]!r}; it must be a unified diff")
    return text if text.endswith("\n") else text + "\n"


def _test_command(row: Mapping[str, object]) -> str | None:
    command = _text(row, "test_command") or _text(row, "test_cmd")
    setup = row.get("setup_info")
    if not command and isinstance(setup, Mapping):
        command = _text(setup, "test_cmd")
    _expect_argument("test_command", command)
    return command or None


def _expect_argument(name: str, text: str) -> None:
    if "\0" in text or _HALF.search(text):
        raise RowError(name, f"has {text[:60]!a}, which cannot be a program argument")


_KNOWN = frozenset(
    (
        *("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"),
        *("FAIL_TO_PASS", "PASS_TO_PASS", "hints_text", "version", "environment_setup_commit"),
        *("created_at", *_IMAGES, "test_command", "test_cmd"),
    )
)
