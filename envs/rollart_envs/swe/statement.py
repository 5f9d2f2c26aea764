"""Problem statements from failing behaviour, without the cause.

Takes: the tests that fail, with their errors, and the gold patch. Gives: a text. Never: shows a
line of the patch: texts that contain one are left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollart_envs.swe.suite import Failed, Script

MAX_SHOWN: Final = 4
"""Maximum number of tests that are described in detail."""
_LINES: Final = 14
_LINE_CHARS: Final = 200
_FOR_PYTEST: Final = re.compile(r"\b[Uu]se '?-vv?'? to (?:get|show)")
"""A hint of pytest for its callers."""
_WORDLESS: Final = re.compile(r"\W*(?:pass|else|try|finally|break|continue|return|None)?\W*")
_BARE_NAME: Final = re.compile(r"[\[({]*[A-Za-z_]\w*[])},:]*")
"""A line with only a name, as in lists of imports: a statement has to be able to name it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A script that fails without the patch and passes with it, and what it shows."""

    script: Script
    actual: str
    """The value of its expression, or the error, without the patch."""
    expected: str
    """The value with the patch; empty if there is none."""
    is_error: bool = False
    """Whether there is an error instead of a value without the patch."""

    def lines(self) -> list[str]:
        """Return the script and its results in Markdown."""
        told = f"`{' '.join(self.script.value.split())}`" if self.expected else "It"
        told += " fails with:" if self.is_error else " gives:"
        text = ["```python", *self.script.text.splitlines(), "```", ""]
        text += [told, "", "```", *self.actual.splitlines(), "```", ""]
        if not self.expected:
            return [*text, "It should end without an error.", ""]
        return [*text, "It should give:", "", "```", *self.expected.splitlines(), "```", ""]


def statement(
    project: str,
    failures: Mapping[str, Failed],
    patch: str,
    *,
    never: Iterable[str] = (),
    shows: Mapping[str, Shown] | None = None,
    of_bugs: Sequence[Collection[str]] = (),
) -> str:
    """Return a description of what is wrong with a project, from its failing tests.

    Args:
        project: Its name.
        failures: Test id -> why it failed; at least one.
        patch: The gold patch.
        never: More texts that must not be shown, such as a commit's hash.
        shows: Test id -> a script that shows the same failure.
        of_bugs: The tests that detect each bug; one of each is shown.
    """
    hidden = [*changed_lines(patch), *filter(None, never)]
    scripts = {
        t: one for t, one in (shows or {}).items() if not _holds("\n".join(one.lines()), hidden)
    }
    shown = _chosen(failures, scripts, of_bugs)
    text = [f"Some of what {project} should do, it does not do, or does wrongly.", ""]
    for test in shown:
        text += _told(test, failures[test], hidden, scripts.get(test))
    rest = len({_function(t) for t in failures}) - len(shown)
    if rest > 0:
        text += [f"{_number(rest, 'more check')} of the same behaviour {_verb(rest)}.", ""]
    text += [
        f"Mend the code of {project}, so that it behaves as these checks expect; what works now"
        " has to go on working. The checks themselves are not in the repository."
    ]
    return "\n".join(text) + "\n"


def changed_lines(patch: str) -> tuple[str, ...]:
    """Return the stripped lines that a patch changes, without trivial ones and bare names."""
    lines = (
        line[1:].strip()
        for line in patch.splitlines()
        if line[:1] in ("+", "-") and not line.startswith(("+++ ", "--- "))
    )
    return tuple(
        dict.fromkeys(
            line for line in lines if not (_WORDLESS.fullmatch(line) or _BARE_NAME.fullmatch(line))
        )
    )


def leaked(text: str, patch: str) -> tuple[str, ...]:
    """Return the changed lines of a patch that occur in a text."""
    return tuple(line for line in changed_lines(patch) if _stands_in(line, text))


def _chosen(
    failures: Mapping[str, Failed],
    scripts: Mapping[str, Shown],
    of_bugs: Sequence[Collection[str]],
) -> list[str]:
    """Return one test of each function: one of each bug first, then different errors.

    Tests with a script come before others.
    """
    by_function: dict[str, str] = {}
    tests = sorted(failures, key=lambda test: (test not in scripts, test))
    for test in tests:
        by_function.setdefault(_function(test), test)
    first = [next((t for t in tests if t in one), "") for one in of_bugs]
    fresh: dict[str, str] = {}
    for test in by_function.values():
        fresh.setdefault(_shape(failures[test]), test)
    rest = [t for t in (*fresh.values(), *by_function.values()) if t in scripts or not scripts]
    shown = dict.fromkeys((*filter(None, first), *rest))
    return list(shown)[:MAX_SHOWN]


def _told(test: str, failed: Failed, hidden: list[str], shown: Shown | None) -> list[str]:
    text = [f"## {_words(test)}", ""]
    doc = _first_paragraph(failed.doc)
    if doc and not _holds(doc, hidden):
        text += [doc, ""]
    if shown is not None:
        return text + shown.lines()
    tried = [_tidied(line) for line in failed.tried if not _holds(line, hidden)]
    if tried:
        text += ["Expected:", "", "```python", *tried, "```", ""]
    lines = [_tidied(line) for line in failed.message.splitlines()[:_LINES]]
    kept = [line for line in lines if line.strip() and not _holds(line, hidden)]
    kept = [line for line in kept if not _FOR_PYTEST.search(line)]
    if kept:
        text += ["Observed:", "", "```", *kept, "```", ""]
    return text


def _words(test: str) -> str:
    """Return a test's name as words: ``test_a.py::TestCut::test_at_end[x]`` -> ``Cut: at end``."""
    path, *names = _function(test).split("::")
    if not names:
        return path
    words = [re.sub(r"^tests?_?|_?tests?$", "", name, flags=re.I) or name for name in names]
    spaced = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", word).replace("_", " ") for word in words]
    return ": ".join(word.strip() for word in spaced)


def _function(test: str) -> str:
    return test.split("[", 1)[0]


def _shape(failed: Failed) -> str:
    first = failed.message.split("\n", 1)[0]
    return re.sub(r"\d+|'[^']*'", "", first)[:60]


def _first_paragraph(doc: str) -> str:
    return re.sub(r"\s+", " ", doc.strip().split("\n\n")[0])[:300]


def _tidied(line: str) -> str:
    line = line.rstrip().replace("/work/repo/", "")
    line = re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", line)
    line = re.sub(r"\b0x[0-9a-f]{8,}\b", "0x…", line)  # addresses change with each run
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"


def _holds(text: str, hidden: Iterable[str]) -> bool:
    return any(_stands_in(line, text) for line in hidden)


def _stands_in(line: str, text: str) -> bool:
    """Return whether a text contains a line as whole words, with any spaces between them."""
    pattern = r"\s+".join(map(re.escape, line.split()))
    return re.search(rf"(?<!\w){pattern}(?!\w)", text) is not None


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _verb(count: int) -> str:
    return "fail" if count != 1 else "fails"
