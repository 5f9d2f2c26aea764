"""``rollart swe make``: from the name of a package to a folder of tasks.

Takes: the order of a user. Gives: tasks in a :class:`TaskFolder`, one by one as they are made.
Never: tries a candidate again that an interrupted run has already tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from rollart_core.errors import UserError, first_line
from rollart_envs.swe import package as packages
from rollart_envs.swe.make import (
    MADE,
    Bounds,
    Judge,
    Row,
    Works,
    changes_of,
    find_baseline,
    make,
)
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.package import Package
from rollart_envs.swe.suite import Suite
from rollart_envs.swe.task_folder import TaskFolder
from rollart_sandboxes.pool.source import SandboxSource

PYTEST: Final = ("-o", "addopts=", "-p", "no:cacheprovider")
"""Ignore the options of the project's own config, which can need plugins that are missing."""
_ODD_NAMES: Final = ("test.py", "tests.py")
"""Test files that pytest does not collect unless they are arguments."""

_TIMEOUT_S: Final = 120.0
_BLOCK: Final = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ASKED: Final = (
    "Rewrite this report of a bug as a user of the library would write it. Keep each code block as"
    " it is, say which function is wrong, and name no cause. Answer with the report only.\n\n"
)

Heard = Callable[[str, float | None], None]
"""Receives a description of the current step, and the share that is done."""


@dataclass(frozen=True, slots=True)
class MakeOrder:
    """The order of a user."""

    package: str
    folder: TaskFolder
    count: int = 10
    seed: int = 0
    jobs: int = 2
    requires: tuple[str, ...] = ()
    pytest: tuple[str, ...] = ()
    """Additional arguments of pytest."""
    python: str = ""
    """Absolute path in the sandbox; empty: the ``python3`` on its PATH."""
    bounds: Bounds = field(default_factory=Bounds)
    statements: str = ""
    """The URL of a chat endpoint that writes the statements; empty: none does."""


@dataclass(frozen=True, slots=True)
class Made:
    """The result of an order."""

    name: str
    num_tasks: int
    """Tasks of this package and seed that are now in the folder."""
    num_new: int
    outcomes: Mapping[str, int]
    """Outcome -> number of candidates."""
    notes: tuple[str, ...] = ()


async def make_tasks(
    order: MakeOrder,
    sandboxes: SandboxSource,
    judge_in: Callable[[TaskFolder], Judge],
    heard: Heard,
) -> Made:
    """Make tasks of a package until there are enough, or no bugs are left to try.

    Raises:
        UserError: If the package or the server for statements does not exist, or the package's
            tests cannot be run.
        SandboxFailure: If sandboxes do not start.
    """
    writer = StatementWriter(order.statements) if order.statements else None
    order.folder.make()
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollart-make-") as temporary:
        # In a thread: the sandboxes' event loop must not wait for pip.
        package = await asyncio.to_thread(_prepared, order, Path(temporary), notes, heard)
        mirror = order.folder.mirror(package.slug)
        commit = mirror.commit_folder(package.root, f"{package.name} {package.version}")
        suite = _suite(order, package, sandboxes)
    heard(f"running the tests of {package.name}", None)
    works = await _works(order, package, mirror, commit, suite)
    works = replace(
        works,
        judge=judge_in(order.folder),
        library=_library(order.folder.site(package.slug), package.name, suite.source_path),
        write=writer.write if writer is not None else None,
    )
    notes += _notes(works)
    return await _make(order, works, notes, heard)


def _prepared(order: MakeOrder, temporary: Path, notes: list[str], heard: Heard) -> Package:
    """Return the unpacked package, with its requirements installed."""
    heard(f"fetching {order.package}", None)
    source = packages.fetch(order.package, temporary / "fetched")
    package = packages.unpack(source, temporary / "tree")
    site = order.folder.site(package.slug)
    if not site.is_dir():
        heard(f"installing what {package.name} needs", None)
        part = site.with_name(site.name + ".part")
        packages.install(source, package, part, requires=order.requires, notes=notes)
        part.rename(site)
    return package


async def _make(order: MakeOrder, works: Works, notes: list[str], heard: Heard) -> Made:
    settings = {"commit": works.commit, "seed": order.seed, "fields": works.fields}
    settings["bounds"] = [order.bounds.max_broken, order.bounds.several]
    settings |= {"statements": order.statements} if order.statements else {}
    progress = order.folder.progress(f"{works.slug}-{order.seed}", settings)
    there = {change for row in order.folder.rows() for change in changes_of(str(row["patch"]))}
    num_before = num_made = sum(outcome == MADE for outcome in progress.outcomes.values())
    if num_made < order.count:
        results = make(works, order.seed, order.jobs, dict(progress.outcomes))
        try:
            async for candidate, outcome in results:
                what = outcome.what
                if outcome.row is not None:
                    changes = changes_of(str(outcome.row["patch"]))
                    if there.isdisjoint(changes):
                        order.folder.add(outcome.row)
                        num_made += 1
                    else:
                        what = "it is there already"
                    there |= changes
                if outcome.is_final:
                    progress.note(str(candidate.number), what)
                heard(f"{works.name}: {num_made} tasks; {what}", num_made / order.count)
                if num_made >= order.count:
                    break
        finally:
            await results.aclose()  # type: ignore[attr-defined]
    outcomes = dict(Counter(progress.outcomes.values()).most_common())
    return Made(works.name, num_made, num_made - num_before, outcomes, tuple(notes))


async def _works(
    order: MakeOrder, package: Package, mirror: Mirror, commit: str, suite: Suite
) -> Works:
    tree = mirror.archive(commit)
    baseline = await find_baseline(suite, tree, package.name)
    if baseline.left_out:
        ignored = (f"--ignore={path}" for path in baseline.left_out)
        suite = replace(suite, arguments=(*suite.arguments, *ignored))
    fields: Row = {
        "repo": package.slug,
        "python_path": [f"site/{package.slug}"],
        "source_path": list(suite.source_path),
        "test_command": shlex.join(["python3", "-m", "pytest", *suite.arguments]),
        **({"python": order.python} if order.python else {}),
    }
    return Works(
        package.name, package.version, package.slug, mirror, commit, suite, baseline,
        _nobody, fields, order.bounds,
    )  # fmt: skip


async def _nobody(row: Row) -> str:
    raise AssertionError("a judge is given before the first row")


def _suite(order: MakeOrder, package: Package, sandboxes: SandboxSource) -> Suite:
    arguments = [*PYTEST, *order.pytest]
    if not any(_has_usual_tests(package.root)):
        odd = (path for name in _ODD_NAMES for path in package.root.rglob(name))
        arguments += sorted(str(path.relative_to(package.root)) for path in odd)
    source_path = ("src",) if (package.root / "src").is_dir() else ()
    site = order.folder.site(package.slug).resolve()
    return Suite(sandboxes, order.python, (site,), source_path, tuple(arguments))


def _library(site: Path, name: str, source_path: tuple[str, ...]) -> frozenset[str]:
    """Return the files of the repository that the installed package contains."""
    wanted = canonicalize_name(name)
    for found in distributions(path=[str(site)]):
        if canonicalize_name(found.metadata["Name"]) == wanted:
            files = [str(file) for file in found.files or () if str(file).endswith(".py")]
            tops = ("", *(f"{folder}/" for folder in source_path))
            return frozenset(f"{top}{file}" for top in tops for file in files)
    return frozenset()


def _has_usual_tests(root: Path) -> Iterable[bool]:
    return (True for pattern in ("test_*.py", "*_test.py") for _ in root.rglob(pattern))


def _notes(works: Works) -> list[str]:
    notes = []
    if works.baseline.left_out:
        files = ", ".join(works.baseline.left_out)
        notes.append(f"left out, because they cannot be imported in the sandbox: {files}")
    if works.baseline.flaky:
        notes.append(f"left out, because they are flaky: {len(works.baseline.flaky)} tests")
    return notes


class StatementWriter:
    """A model behind ``URL/chat/completions``; the server's first model is used.

    Raises:
        UserError: If the server does not answer, or has no model.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            self._model = str(self._said("models", None)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = first_line(str(error)) or type(error).__name__
            raise UserError(f"--statements {url}: {why}; give the URL before /models") from None

    async def write(self, facts: str) -> str:
        """Return a text with all code blocks of the facts; "" if the model gave none."""
        messages = [{"role": "user", "content": _ASKED + facts}]
        body = {"model": self._model, "messages": messages, "temperature": 0}
        try:
            said = await asyncio.to_thread(self._said, "chat/completions", body)
            text = str(said["choices"][0]["message"]["content"]).strip() + "\n"
        except (OSError, ValueError, LookupError, TypeError):
            return ""
        return text if all(block in text for block in _BLOCK.findall(facts)) else ""

    def _said(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", content, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
