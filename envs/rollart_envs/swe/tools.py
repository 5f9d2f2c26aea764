"""The agent's actions as text: one fenced block per answer, ``bash`` or ``edit``.

Takes: the model's answer. Gives: a :class:`Bash`, an ``Edit`` or a :class:`Submit`, or an
:class:`ActionError` that explains the format. Never: runs anything.

A command runs in a new shell: its folder and variables do not persist, but files do. Only the
command ``submit`` ends the episode; a file or output that contains the word does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from rollart_envs.swe.editor import VERBS, Edit, Verb

SUBMIT = "submit"
MAX_OUTPUT_CHARS = 10_000

SHELL_ENV = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_EDITOR": "true",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "TERM": "dumb",
}
"""Variables that keep programs from waiting for input or drawing on a terminal."""

HELP = """\
Answer with exactly one action in one fenced block. A shell command:

```bash
grep -rn "def area" src
```

or an edit: `view PATH [FIRST LAST]`, `create PATH`, `insert PATH AFTER_LINE` (the text on the lines
below), `undo_edit PATH`, or

```edit
str_replace src/shapes.py
<<<<<<< old
    return width + height
=======
    return width * height
>>>>>>> new
```

Each command runs in a fresh shell. When the work is done:

```bash
submit
```"""

_FENCE = re.compile(r"^(`{3,})[ \t]*([\w+-]*)[ \t]*$")
_REPLACE = re.compile(r"<{7} old\n(.*?)^={7}\n(.*?)^>{7} new", re.DOTALL | re.MULTILINE)


class ActionError(ValueError):
    """An answer that is not an action; the message is for the agent."""


@dataclass(frozen=True, slots=True)
class Bash:
    """A command for a new shell."""

    command: str

    @property
    def argv(self) -> tuple[str, ...]:
        """The command to run in the sandbox."""
        return ("bash", "-c", self.command)


@dataclass(frozen=True, slots=True)
class Submit:
    """The agent reports that it is done."""


Action: TypeAlias = Bash | Edit | Submit


def parse_action(answer: str) -> Action:
    """Return the one action in an answer.

    Raises:
        ActionError: If there is no action, more than one, or its block has the wrong format.
    """
    blocks = [(kind, body) for kind, body in fenced_blocks(answer) if kind in _KINDS]
    if len(blocks) != 1:
        found = "no action" if not blocks else f"{len(blocks)} actions"
        raise ActionError(f"Your answer held {found}.\n\n{HELP}")
    kind, body = blocks[0]
    if not body.strip():
        raise ActionError(f"The block was empty.\n\n{HELP}")
    if bad := _UNHELD.search(body):
        raise ActionError(f"The block held {bad[0]!a}, which no command or path can.\n\n{HELP}")
    if kind == "edit":
        return _edit(body)
    return Submit() if body.strip() == SUBMIT else Bash(body.strip("\n"))


def fenced_blocks(answer: str) -> list[tuple[str, str]]:
    """Return (language, content) of each closed block; it ends at a fence of the same length."""
    blocks, fence, kind, body = [], "", "", list[str]()
    for line in answer.replace("\r\n", "\n").split("\n"):
        if fence:
            if line.rstrip() == fence:
                blocks.append((kind, "".join(body)))
                fence = ""
            else:
                body.append(line + "\n")
        elif found := _FENCE.match(line):
            fence, kind, body = found[1], found[2].lower(), []
    return blocks


def cut_output(text: str, limit: int = MAX_OUTPUT_CHARS) -> str:
    """Return text unchanged, or its head and tail with a note about the part left out.

    Args:
        text: The output of a command.
        limit: Number of characters of the text to keep; the note is added.
    """
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = f"\n[... {len(text) - limit} characters left out; print less to see them ...]\n"
    return text[:head] + note + (text[-tail:] if tail else "")


_KINDS = ("bash", "sh", "shell", "edit")
_UNHELD = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""NUL and halves of surrogate pairs, except those that represent bytes (``surrogateescape``)."""
_MAX_DIGITS = 9


def _edit(body: str) -> Edit:
    head, _, rest = body.partition("\n")
    verb_word, *words = head.split()[:1] + head.split()[1:] or [""]
    verb: Verb | None = next((known for known in VERBS if known == verb_word), None)
    if verb is None:
        raise ActionError(f"{verb_word!r} is no edit; there are {', '.join(VERBS)}.\n\n{HELP}")
    num_numbers = {"view": (0, 1, 2), "insert": (1,)}.get(verb, (0,))
    numbers = words[1:]
    if not words or len(numbers) not in num_numbers or not all(map(_is_number, numbers)):
        raise ActionError(f"The first line {head!r} is not as it should be.\n\n{HELP}")
    lines = [int(number) for number in numbers] + [None, None]
    if verb != "str_replace":
        return Edit(verb, words[0], text=rest, first_line=lines[0], last_line=lines[1])
    found = _REPLACE.fullmatch(rest.rstrip())
    if found is None:
        raise ActionError(f"str_replace needs the three marks on lines of their own.\n\n{HELP}")
    return Edit(verb, words[0], text=_last_newline_off(found[2]), old=_last_newline_off(found[1]))


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= _MAX_DIGITS


def _last_newline_off(text: str) -> str:
    return text.removesuffix("\n")
