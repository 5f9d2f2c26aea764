"""The agent's text editor: view, create, str_replace, insert and undo_edit, on text alone.

Takes: an :class:`Edit` and the current text of the file. Gives: the new text and a message for the
agent. Never: accesses a file; the caller reads and writes it in the sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Verb: TypeAlias = Literal["view", "create", "str_replace", "insert", "undo_edit"]
VERBS: tuple[Verb, ...] = ("view", "create", "str_replace", "insert", "undo_edit")
AROUND_LINES = 4
"""Lines shown before and after a change."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One call of the editor."""

    verb: Verb
    path: str
    text: str = ""
    """``create``: the whole file; ``insert``: the lines; ``str_replace``: the replacement."""
    old: str = ""
    """``str_replace``: the text to replace, which must occur exactly once."""
    first_line: int | None = None
    """``view``: the first line to show, from 1; ``insert``: the line to insert after, from 0."""
    last_line: int | None = None
    """``view``: the last line to show; None: to the end of the file."""


@dataclass(frozen=True, slots=True)
class Edited:
    """The result of an edit."""

    message: str
    """Shown to the agent."""
    text: str | None
    """The new text of the file; None: there is no file."""
    ok: bool = True


@dataclass(slots=True)
class History:
    """The texts of files before each edit of this episode, for ``undo_edit``."""

    _before: dict[str, list[str | None]] = field(default_factory=dict)

    def apply(self, edit: Edit, text: str | None) -> Edited:
        """Apply an edit to a file's text (None: no such file), and store how to undo it."""
        if edit.verb == "undo_edit":
            return self._undo(edit.path, text)
        edited = apply_edit(edit, text)
        if edited.ok and edit.verb != "view":
            self._before.setdefault(edit.path, []).append(text)
        return edited

    def _undo(self, path: str, text: str | None) -> Edited:
        if not self._before.get(path):
            return Edited(f"There is no edit of {path} to undo.", text, ok=False)
        before = self._before[path].pop()
        gone = " The file was made by it and is gone." if before is None else ""
        return Edited(f"The last edit of {path} is undone.{gone}", before)


def apply_edit(edit: Edit, text: str | None) -> Edited:
    """Apply any edit except ``undo_edit``, which needs a :class:`History`."""
    if edit.verb == "create":
        return _create(edit, text)
    if text is None:
        return Edited(f"There is no file {edit.path}.", None, ok=False)
    if edit.verb == "view":
        return _view(edit, text)
    return _insert(edit, text) if edit.verb == "insert" else _str_replace(edit, text)


def numbered(lines: list[str], first: int = 1) -> str:
    """Return lines with line numbers."""
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, start=first))


def _create(edit: Edit, text: str | None) -> Edited:
    if text is not None:
        return Edited(f"{edit.path} is there already; change it with str_replace.", text, ok=False)
    return Edited(f"Made {edit.path}, {len(_lines(edit.text))} lines.", edit.text)


def _view(edit: Edit, text: str) -> Edited:
    lines = _lines(text)
    first, last = edit.first_line or 1, edit.last_line or len(lines)
    if not lines:
        return Edited(f"{edit.path} is empty.", text)
    if not 1 <= first <= last or first > len(lines):
        message = f"{edit.path} has lines 1 to {len(lines)}; {first} to {last} is no part of it."
        return Edited(message, text, ok=False)
    return Edited(numbered(lines[first - 1 : last], first), text)


def _insert(edit: Edit, text: str) -> Edited:
    lines = text.split("\n")
    ends_open = lines[-1] != ""
    num_lines = len(lines) if ends_open else len(lines) - 1
    after = edit.first_line if edit.first_line is not None else -1
    if not 0 <= after <= num_lines:
        message = f"{edit.path} has {num_lines} lines; insert after line 0 to {num_lines}."
        return Edited(message, text, ok=False)
    added = edit.text.removesuffix("\n").split("\n")
    new = "\n".join([*lines[:after], *added, *lines[after:]])
    return Edited(_shown(edit.path, new, after + 1, len(added)), new)


def _str_replace(edit: Edit, text: str) -> Edited:
    count = _count(text, edit.old)
    if not edit.old or count != 1:
        return Edited(_why_not_once(edit, text, count), text, ok=False)
    new = text.replace(edit.old, edit.text)
    line = text[: text.index(edit.old)].count("\n") + 1
    return Edited(_shown(edit.path, new, line, edit.text.count("\n") + 1), new)


def _count(text: str, part: str) -> int:
    """Count occurrences, including overlapping ones: each is a possible match."""
    places, at = 0, text.find(part) if part else -1
    while at >= 0:
        places, at = places + 1, text.find(part, at + 1)
    return places


def _why_not_once(edit: Edit, text: str, count: int) -> str:
    if not edit.old:
        return "The old text is empty; give the text to replace, or use insert."
    if count:
        at = [i for i in range(len(text)) if text.startswith(edit.old, i)]
        lines = ", ".join(str(text[:i].count("\n") + 1) for i in at[:10])
        return f"The old text stands {count} times in {edit.path}, lines {lines}; take more lines."
    first = edit.old.strip().split("\n")[0].strip()
    near = [n for n, line in enumerate(_lines(text), start=1) if first and line.strip() == first]
    hint = f" Its first line stands in line {near[0]}; mind the spaces." if near else ""
    return f"The old text does not stand in {edit.path}.{hint}"


def _shown(path: str, text: str, line: int, num_lines: int) -> str:
    """Return the lines around a change."""
    first = max(1, line - AROUND_LINES)
    lines = _lines(text)[first - 1 : line - 1 + num_lines + AROUND_LINES]
    return f"Changed {path}:\n{numbered(lines, first)}"


def _lines(text: str) -> list[str]:
    """Return lines as an editor counts them: only newlines end a line."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines
