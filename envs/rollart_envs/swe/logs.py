"""Test logs: what each framework prints, read as the SWE-bench harness reads it.

Takes: the text of a log. Gives: test id -> :data:`Status`. Never: trusts a pass over a failure:
once a test is seen to fail, no later line makes it pass.

How far this holds: a log is written by the very process that runs the agent's code, so what that
code prints between the markers can look like a result. For pytest, passes count only in the
summary at the end and failures anywhere, so prints inside tests change nothing; but code that
ends the process early and prints a summary of its own would be believed. django's and sympy's
logs hold less than that. Where pytest is the runner, use :mod:`rollart_envs.swe.report_plugin`
instead; it needs no log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"]
Statuses: TypeAlias = Mapping[str, Status]

_RANK: dict[Status, int] = {
    "SKIPPED": 0,
    "PASSED": 1,
    "XFAIL": 2,
    "XPASS": 3,
    "FAILED": 4,
    "ERROR": 5,
}
_COLOUR = re.compile(r"\x1b?\[\d+(?:;\d+)*m")
_CONTROLS = {code: None for code in range(1, 32) if code not in (9, 10)}
_SUMMARY = re.compile(r"^=+ short test summary info =+\s*$", re.MULTILINE)
_FIRST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)[ \t]+(\S+)", re.MULTILINE)
_LAST = re.compile(
    r"^(\S+)[ \t]+(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
    r"(?:[ \t]+\(.*\))?(?:[ \t]+\[[ \d/%]+\])?$",
    re.MULTILINE,
)
_OPTION = re.compile(r"(.*?)\[(.*)\]")


class MarkersMissing(ValueError):
    """A log does not hold each marker of its run exactly once: nothing in it counts."""


def marked(command: str, nonce: str) -> str:
    """Return a shell command that prints the run's markers around what another one prints.

    The nonce stands in the command, so code in the box that looks for it can find it: markers hold
    against output that was prepared, not against code that forges them while it runs.
    """
    return f"echo '{_marker('start', nonce)}'\n{command}\necho '{_marker('end', nonce)}'\n"


def between_markers(log: str, nonce: str) -> str:
    """Return what a log holds between the run's own markers.

    Raises:
        MarkersMissing: A marker is missing, stands twice, or they stand in the wrong order.
    """
    lines = [line.strip() for line in log.split("\n")]
    places = [
        [n for n, line in enumerate(lines) if line == _marker(which, nonce)]
        for which in ("start", "end")
    ]
    if [len(found) for found in places] != [1, 1] or places[0][0] > places[1][0]:
        raise MarkersMissing(
            f"the log holds the start marker {len(places[0])} times and the end marker"
            f" {len(places[1])} times"
        )
    return "\n".join(log.split("\n")[places[0][0] + 1 : places[1][0]])


def worst(pairs: Iterable[tuple[str, Status]]) -> dict[str, Status]:
    """Return one status for each id: the worst of those it came with, a skip being the mildest."""
    statuses: dict[str, Status] = {}
    for test, status in pairs:
        if test not in statuses or _RANK[status] > _RANK[statuses[test]]:
            statuses[test] = status
    return statuses


def read_pytest(log: str) -> dict[str, Status]:
    """Read pytest's output: the summary of ``-rA``, or without one the lines of ``-v``.

    An id is cut at its first space, as the log's reader cannot tell where it ends.
    """
    text = _COLOUR.sub("", log).translate(_CONTROLS)
    heads = list(_SUMMARY.finditer(text))
    summary = text[heads[-1].end() :] if heads else text
    found = [(match[2], _status(match[1])) for match in _FIRST.finditer(text)]
    tail = {(match[2], _status(match[1])) for match in _FIRST.finditer(summary)}
    pairs = [pair for pair in found if pair in tail or pair[1] in ("FAILED", "ERROR")]
    if not heads:
        pairs += [(match[1], _status(match[2])) for match in _LAST.finditer(text)]
    return worst(pairs)


def read_pytest_options(log: str) -> dict[str, Status]:
    """Read pytest's output, shortening parameters that are paths (see :func:`short_option`)."""
    return worst((short_option(test), status) for test, status in read_pytest(log).items())


def read_matplotlib(log: str) -> dict[str, Status]:
    """Read matplotlib's pytest output, in which Python 3.11 and later name mouse buttons."""
    return worst((mouse_number(test), status) for test, status in read_pytest(log).items())


def short_option(test: str) -> str:
    """Return an id whose parameter is a path with its last part only: ``t[/a/b]`` -> ``t[/b]``."""
    found = _OPTION.search(test)
    if found is None:
        return test
    name, option = found.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rsplit("/", 1)[-1]
    return f"{name}[{option}]"


def mouse_number(test: str) -> str:
    """Return an id with the numbers of mouse buttons in place of their names."""
    return test.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")


def read_unittest(log: str) -> dict[str, Status]:
    """Read the output of ``unittest -v`` and of django's runner.

    An id is what stands before `` ... ``: ``test_a (package.module.Class)``, or the first line of
    the test's docstring where it has one. Prints between an id and its result are passed over.
    """
    pairs: list[tuple[str, Status]] = []
    waiting: str | None = None
    for line in (raw.strip() for raw in _COLOUR.sub("", log).split("\n")):
        test, dots, rest = line.rpartition(" ... ")
        if failed := _UNITTEST_FAILED.match(line):
            pairs.append((failed[2], "FAILED" if failed[1] == "FAIL" else "ERROR"))
            waiting = None
        elif dots and (status := _unittest_status(rest)):
            # Two tests may stand on one line, or a test and what it prints: the harness takes both
            # for one id, and waits for the first one's result.
            first, *others = test.split(" ... ")
            names = dict.fromkeys((_without_migration(test), *others[-1:]))
            pairs += [(name, status) for name in names]
            waiting = first if others else None
        elif " ... " in line:
            waiting = line.split(" ... ")[0]
        elif line.endswith(" ..."):
            waiting = line.removesuffix(" ...")
        elif waiting is not None and (status := _unittest_status(line)):
            pairs.append((waiting, status))
            waiting = None
        if "--version is equivalent to version" in line:
            # django prints over the result of this one test.
            pairs.append(("--version is equivalent to version", "PASSED"))
    return worst(pairs)


_UNITTEST_FAILED = re.compile(r"(FAIL|ERROR): (\S+(?: \([\w.]+\))?)")


def _unittest_status(text: str) -> Status | None:
    text = text.strip()
    if text.startswith("skipped"):
        return "SKIPPED"
    results: dict[str, Status] = {
        "ok": "PASSED",
        "OK": "PASSED",
        "FAIL": "FAILED",
        "ERROR": "ERROR",
        "expected failure": "XFAIL",
        "unexpected success": "XPASS",
    }
    return results.get(text)


def _without_migration(test: str) -> str:
    """Return the id behind a migration that is reported on the same line."""
    return test.split("...", 1)[-1].strip() if test.startswith("Applying ") else test


def read_sympy(log: str) -> dict[str, Status]:
    """Read the output of sympy's ``bin/test -C --verbose``.

    Ids are bare names of functions; in two files, one name's worse result holds.
    """
    pairs: list[tuple[str, Status]] = []
    for line in (raw.strip() for raw in _COLOUR.sub("", log).split("\n")):
        if failed := _SYMPY_FAILED.fullmatch(line):
            pairs.append((failed[1], "FAILED"))
        elif (found := _SYMPY_LINE.match(line)) and found[2] in _SYMPY_LETTERS:
            pairs.append((found[1], _SYMPY_LETTERS[found[2]]))
    return worst(pairs)


_SYMPY_FAILED = re.compile(r"_{3,} .*?\.py:(\w+) _{3,}")
_SYMPY_LINE = re.compile(r"(test_\w+) (ok|[EFfXs])(?:\s+\[(?:OK|FAIL)\])?$")
_SYMPY_LETTERS: dict[str, Status] = {
    "ok": "PASSED",
    "E": "ERROR",
    "F": "FAILED",
    "f": "XFAIL",
    "X": "XPASS",
    "s": "SKIPPED",
}

READERS: dict[str, Callable[[str], dict[str, Status]]] = {
    "pytest": read_pytest,
    "pytest-options": read_pytest_options,
    "matplotlib": read_matplotlib,
    "unittest": read_unittest,
    "sympy": read_sympy,
}
_FRAMEWORKS = {
    "django/django": "unittest",
    "sympy/sympy": "sympy",
    "matplotlib/matplotlib": "matplotlib",
    "psf/requests": "pytest-options",
    "pylint-dev/pylint": "pytest-options",
    "pydicom/pydicom": "pytest-options",
}


def framework_of(repo: str) -> str:
    """Return how a repository's tests report: a key of :data:`READERS`; pytest unless known."""
    return _FRAMEWORKS.get(repo, "pytest")


def _marker(which: str, nonce: str) -> str:
    return f">>>>> {which} of the tests {nonce}"


def _status(word: str) -> Status:
    return next(status for status in _RANK if status == word)
