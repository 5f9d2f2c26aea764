"""Read the test logs of several frameworks, as the SWE-bench harness does.

Takes: the text of a log. Gives: test id -> :data:`Status`. Never: lets a pass override a failure:
after a test has failed, no later line makes it pass.

Limits: the process that runs the agent's code writes the log, so output of that code between the
markers can look like a result. For pytest, passes count only in the summary at the end and failures
count anywhere, so prints inside tests change nothing. But code that ends the process early and
prints its own summary would be believed. The logs of django and sympy are less reliable than that.
If pytest is the runner, use :mod:`rollart_envs.swe.report_plugin` instead; it needs no log.
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
    """A log does not have each marker of its run exactly once, so nothing in it counts."""


def marked(command: str, nonce: str) -> str:
    """Return a shell command that prints the run's markers around the output of another one.

    The nonce is in the command, so code in the sandbox can find it: markers protect against
    prepared output, not against code that forges them while it runs.
    """
    return f"echo '{_marker('start', nonce)}'\n{command}\necho '{_marker('end', nonce)}'\n"


def between_markers(log: str, nonce: str) -> str:
    """Return the text of a log between the run's own markers.

    Raises:
        MarkersMissing: If a marker is missing, occurs twice, or the order is wrong.
    """
    lines = [line.strip() for line in log.split("\n")]
    places = [
        [n for n, line in enumerate(lines) if line == _marker(which, nonce)]
        for which in ("start", "end")
    ]
    if [len(found) for found in places] != [1, 1] or places[0][0] > places[1][0]:
        raise MarkersMissing(
            f"the log has the start marker {len(places[0])} times and the end marker"
            f" {len(places[1])} times"
        )
    return "\n".join(log.split("\n")[places[0][0] + 1 : places[1][0]])


def worst(pairs: Iterable[tuple[str, Status]]) -> dict[str, Status]:
    """Return one status for each id: the worst that was reported; a skip is the mildest."""
    statuses: dict[str, Status] = {}
    for test, status in pairs:
        if test not in statuses or _RANK[status] > _RANK[statuses[test]]:
            statuses[test] = status
    return statuses


def read_pytest(log: str) -> dict[str, Status]:
    """Read pytest's output: the summary of ``-rA``, or without one the lines of ``-v``.

    An id is cut at its first space, because the reader cannot detect where it ends.
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
    """Read pytest's output and shorten parameters that are paths (see :func:`short_option`)."""
    return worst((short_option(test), status) for test, status in read_pytest(log).items())


def read_matplotlib(log: str) -> dict[str, Status]:
    """Read matplotlib's pytest output, in which Python 3.11 and later print mouse button names."""
    return worst((mouse_number(test), status) for test, status in read_pytest(log).items())


def short_option(test: str) -> str:
    """Return an id with a path parameter cut to its last part: ``t[/a/b]`` -> ``t[/b]``."""
    found = _OPTION.search(test)
    if found is None:
        return test
    name, option = found.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rsplit("/", 1)[-1]
    return f"{name}[{option}]"


def mouse_number(test: str) -> str:
    """Return an id with the numbers of mouse buttons instead of their names."""
    return test.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")


def read_unittest(log: str) -> dict[str, Status]:
    """Read the output of ``unittest -v`` and of django's runner.

    An id is the text before `` ... ``: ``test_a (package.module.Class)``, or the first line of
    the test's docstring if it has one. Output between an id and its result is ignored.
    """
    pairs: list[tuple[str, Status]] = []
    waiting: str | None = None
    for line in (raw.strip() for raw in _COLOUR.sub("", log).split("\n")):
        test, dots, rest = line.rpartition(" ... ")
        if failed := _UNITTEST_FAILED.match(line):
            pairs.append((failed[2], "FAILED" if failed[1] == "FAIL" else "ERROR"))
            waiting = None
        elif dots and (status := _unittest_status(rest)):
            # Two tests can be on one line, or a test and its output: the harness treats both as
            # one id, and waits for the result of the first one.
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
            # django prints over the result of this test.
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
    """Return the id after a migration that is reported on the same line."""
    return test.split("...", 1)[-1].strip() if test.startswith("Applying ") else test


def read_sympy(log: str) -> dict[str, Status]:
    """Read the output of sympy's ``bin/test -C --verbose``.

    Ids are function names without a file. If two files have the same name, the worse result counts.
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
    """Return the log format of a repository's tests, a key of :data:`READERS`; default: pytest."""
    return _FRAMEWORKS.get(repo, "pytest")


def _marker(which: str, nonce: str) -> str:
    return f">>>>> {which} of the tests {nonce}"


def _status(word: str) -> Status:
    return next(status for status in _RANK if status == word)
