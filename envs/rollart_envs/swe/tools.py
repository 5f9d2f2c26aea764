"""The agent's actions: one fenced block per answer, ``bash`` or ``edit``, or function calls.

Takes: the model's answer. Gives: a :class:`Bash`, an ``Edit`` or a :class:`Submit`, or an
:class:`ActionError` that says what is wrong. Never: runs anything.

Only the command or call ``submit`` ends the episode; a file or output that contains the word does
not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollart_core.rollout.tools.action import Call
from rollart_core.types import FunctionSpec, ToolSpec
from rollart_envs.swe.config import MAX_OUTPUT_CHARS
from rollart_envs.swe.editor import VERBS, Edit, Verb

SUBMIT = "submit"

SHELL_ENV = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_EDITOR": "true",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "TERM": "dumb",
    "PYTHONUNBUFFERED": "1",
}
"""Variables that keep programs from waiting for input, drawing on a terminal, or writing stdout and
stderr out of order."""

_HELP = """\
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

{shell} When the work is done:

```bash
submit
```"""
_TOOLS_HELP = """\
Work with the tools: `bash` runs a shell command in the repository, the others view and edit files.
{shell} When the work is done, call `submit`."""
_SHELLS = {
    "fresh": "Each command runs in a fresh shell.",
    "persistent": "The shell keeps its folder and variables from command to command.",
}


def help_text(shell: str, *, tools: bool) -> str:
    """Return the format of actions, for the agent."""
    return (_TOOLS_HELP if tools else _HELP).format(shell=_SHELLS[shell])


_FRESH = 'exec bash -c "$1" 2>&1'
_PERSISTENT = r"""
exec 2>&1
readonly __command=$1 __state=$2 __home=$PWD
set --
if [ -f "$__state/cwd" ]; then
    . "$__state/values" 2> /dev/null
    cd -- "$(cat "$__state/cwd")" 2> /dev/null \
        || { cd -- "$__home"; echo "(the shell's folder is gone; now in $PWD)"; }
    . "$__state/options" 2> /dev/null
fi
trap '{ __code=$?; mkdir -p "$__state"; set +o > "$__state/options"; shopt -p >> "$__state/options"
    set +eux; trap - EXIT; pwd > "$__state/cwd"
    { declare -p; declare -f; alias -p; } > "$__state/values"; } 2> /dev/null
    exit $__code' EXIT
eval "$__command"
"""
"""Starts with the state that the previous command left, and leaves its own."""

_FENCE = re.compile(r"^(`{3,})[ \t]*([\w+-]*)[ \t]*$")
_REPLACE = re.compile(r"<{7} old\n(.*?)^={7}\n(.*?)^>{7} new", re.DOTALL | re.MULTILINE)


class ActionError(ValueError):
    """An answer that is not an action; the message is for the agent."""


@dataclass(frozen=True, slots=True)
class Bash:
    """A shell command."""

    command: str

    def argv(self, state: str = "") -> tuple[str, ...]:
        """Return the command to run in the sandbox, with stderr in stdout, in order.

        Args:
            state: Folder with the state of the shell; empty: the shell is a fresh one.
        """
        return ("bash", "-c", _PERSISTENT if state else _FRESH, "bash", self.command, state)


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
        raise ActionError(f"Your answer held {found}.")
    kind, body = blocks[0]
    if not body.strip():
        raise ActionError("The block was empty.")
    if bad := _UNHELD.search(body):
        raise ActionError(f"The block held {bad[0]!a}, which no command or path can.")
    if kind == "edit":
        return _edit(body)
    return Submit() if body.strip() == SUBMIT else Bash(body.strip("\n"))


def called_action(call: Call) -> Action:
    """Return the action of a function call.

    Raises:
        ActionError: If there is no such function, or its arguments are not as it needs.
    """
    given = dict(call.arguments)
    fields = next((f for name, _, f in _FUNCTIONS if name == call.name), None)
    if fields is None:
        names = ", ".join(name for name, *_ in _FUNCTIONS)
        raise ActionError(f"There is no tool {call.name!r}; there are {names}.")
    lines = given.keys() & {"first_line", "last_line", "after_line"}
    missing = [name for name in fields if name not in (*given, "first_line", "last_line")]
    wrong = [name for name in given if name not in fields]
    wrong += [n for n, v in given.items() if type(v) is not (int if n in lines else str)]
    if missing or wrong:
        raise ActionError(f"{call.name} takes {', '.join(fields) or 'no arguments'}.")
    if any(_UNHELD.search(text) for text in given.values() if isinstance(text, str)):
        raise ActionError("The arguments held a character that no command or path can.")
    if call.name == "bash":
        return Bash(given["command"])
    return Submit() if call.name == SUBMIT else _called_edit(call.name, given)


def _called_edit(name: str, given: dict[str, Any]) -> Edit:
    verb: Verb = next(known for known in VERBS if known == name)
    return Edit(
        verb,
        given["path"],
        text=given.get("text", given.get("new", "")),
        old=given.get("old", ""),
        first_line=given.get("first_line", given.get("after_line")),
        last_line=given.get("last_line"),
    )


def function_specs() -> list[ToolSpec]:
    """Return the functions that the model can call."""
    return [
        ToolSpec(
            type="function",
            function=FunctionSpec(
                name=name,
                description=does,
                parameters={
                    "type": "object",
                    "properties": {key: dict(said) for key, said in fields.items()},
                    "required": [k for k in fields if k not in ("first_line", "last_line")],
                    "additionalProperties": False,
                },
            ),
        )
        for name, does, fields in _FUNCTIONS
    ]


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


_PATH = {"type": "string", "description": "Path of the file, from the repository."}
_TEXT = {"type": "string"}
_LINE = {"type": "integer", "minimum": 0}
_FUNCTIONS: tuple[tuple[str, str, Mapping[str, Mapping[str, object]]], ...] = (
    ("bash", "Run a shell command in the repository.", {"command": _TEXT}),
    (
        "view",
        "Show a file with line numbers, or its lines first_line to last_line.",
        {"path": _PATH, "first_line": _LINE, "last_line": _LINE},
    ),
    ("create", "Create a file.", {"path": _PATH, "text": _TEXT}),
    (
        "str_replace",
        "Replace a text that stands exactly once in a file.",
        {"path": _PATH, "old": _TEXT, "new": _TEXT},
    ),
    (
        "insert",
        "Insert lines after a line; 0: at the start of the file.",
        {"path": _PATH, "after_line": _LINE, "text": _TEXT},
    ),
    ("undo_edit", "Undo the last edit of a file.", {"path": _PATH}),
    (SUBMIT, "End the work: the repository is judged as it is now.", {}),
)
_KINDS = ("bash", "sh", "shell", "edit")
_UNHELD = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""NUL and halves of surrogate pairs, except those that represent bytes (``surrogateescape``)."""
_MAX_DIGITS = 9


def _edit(body: str) -> Edit:
    head, _, rest = body.partition("\n")
    verb_word, *words = head.split()[:1] + head.split()[1:] or [""]
    verb: Verb | None = next((known for known in VERBS if known == verb_word), None)
    if verb is None:
        raise ActionError(f"{verb_word!r} is no edit; there are {', '.join(VERBS)}.")
    num_numbers = {"view": (0, 1, 2), "insert": (1,)}.get(verb, (0,))
    numbers = words[1:]
    if not words or len(numbers) not in num_numbers or not all(map(_is_number, numbers)):
        raise ActionError(f"The first line {head!r} is not as it should be.")
    lines = [int(number) for number in numbers] + [None, None]
    if verb != "str_replace":
        return Edit(verb, words[0], text=rest, first_line=lines[0], last_line=lines[1])
    found = _REPLACE.fullmatch(rest.rstrip())
    if found is None:
        raise ActionError("str_replace needs the three marks on lines of their own.")
    return Edit(verb, words[0], text=_last_newline_off(found[2]), old=_last_newline_off(found[1]))


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= _MAX_DIGITS


def _last_newline_off(text: str) -> str:
    return text.removesuffix("\n")
