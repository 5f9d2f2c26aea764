"""``rollart swe``: make tasks from a git repository or package, and validate them.

Takes: the command line. Gives: tables, or one JSON object. Never: makes, mines or judges tasks
itself; other modules do that.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollart_core.cli.options import as_options
from rollart_core.cli.output import print_json, print_table
from rollart_core.cli.progress import display
from rollart_core.errors import UserError
from rollart_core.plugins.registry import checked_options
from rollart_envs.swe.import_rows import ImportOrder, import_tasks
from rollart_envs.swe.make import Bounds
from rollart_envs.swe.make_command import Heard, Made, MakeOrder, make_tasks
from rollart_envs.swe.mine import Limits, MineOrder, mine_tasks
from rollart_envs.swe.official_rows import DATA_SETS
from rollart_envs.swe.task_folder import TaskFolder
from rollart_envs.swe.validate import Verdict, finish, judge_for, record_statuses
from rollart_envs.swe.validate import validate as validated
from rollart_sandboxes.pool.source import SandboxSource, sandbox_source

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Folder of tasks. Tasks are added if it exists.")]
Count = Annotated[int, typer.Option(min=1, help="Number of tasks that the folder should have.")]
Jobs = Annotated[int, typer.Option(min=1, help="Maximum number of concurrent sandboxes.")]
Sandbox = Annotated[str, typer.Option(help="Id or alias of the sandbox.")]
SandboxOptions = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Option of the sandbox.")
]
Requires = Annotated[str, typer.Option(help="Additional pip requirements, as one string.")]
Pytest = Annotated[str, typer.Option(help="Additional pytest arguments, as one string.")]
Python = Annotated[
    str, typer.Option(help="Path in the sandbox of the Python for the tests. Default: python3.")
]
Timeout = Annotated[
    float | None, typer.Option(min=1, help="Timeout in seconds for the tests of one judgement.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(epilog="Example: rollart swe make toolz --out ./tasks --count 20")
def swe() -> None:
    """Make software-repair tasks from git repositories and packages, and check them."""


@app.command(epilog="Example: rollart swe make toolz --out ./tasks --count 20 --seed 1")
def make(
    package: Annotated[
        str, typer.Argument(help="A pip name, folder, sdist or wheel that contains tests.")
    ],
    out: Out = Path("swe-tasks"),
    count: Count = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same tasks.")] = 0,
    jobs: Jobs = 2,
    sandbox: Sandbox = "bubblewrap",
    options: SandboxOptions = None,
    requires: Requires = "",
    pytest: Pytest = "",
    python: Python = "",
    max_broken: Annotated[
        float, typer.Option(min=0, max=1, help="Largest share of the tests that a bug can break.")
    ] = 0.3,
    several: Annotated[
        float, typer.Option(min=0, max=1, help="Share of tasks with more than one bug.")
    ] = 0.2,
    statements: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="OpenAI-compatible server whose model writes the statements, such as"
            " http://127.0.0.1:8000/v1. Default: they are made of the tests.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Put bugs into a package that its own tests detect; each bug is a task.

    Stop with Ctrl-C. To continue, run the same command again.
    """
    sandboxes = _sandboxes(sandbox, options)
    order = MakeOrder(
        package,
        TaskFolder(out),
        count,
        seed,
        jobs,
        _split("--requires", requires),
        _split("--pytest", pytest),
        python,
        Bounds(max_broken, several),
        statements,
    )
    with _heard() as heard:
        made = finish(make_tasks(order, sandboxes, judge_for(sandboxes, python), heard))
    _end(made, order.folder, count, as_json)


@app.command(epilog="Example: rollart swe mine ./my-project --out ./tasks --count 20")
def mine(
    repo: Annotated[str, typer.Argument(help="A git repository: a folder or URL.")],
    out: Out = Path("swe-tasks"),
    count: Count = 10,
    jobs: Jobs = 2,
    revision: Annotated[str, typer.Option(help="The newest revision to use.")] = "HEAD",
    name: Annotated[str, typer.Option(help="Name in the tasks. Default: from the address.")] = "",
    sandbox: Sandbox = "bubblewrap",
    options: SandboxOptions = None,
    requires: Requires = "",
    python_path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder with pytest and the tests' imports. Default: install them."),
    ] = None,
    source_path: Annotated[
        list[str] | None,
        typer.Option(help="Folder of the repository to import from. Default: see pyproject.toml."),
    ] = None,
    pytest: Pytest = "",
    python: Python = "",
    max_files: Annotated[int, typer.Option(min=2, help="Maximum files of a commit.")] = 12,
    max_lines: Annotated[int, typer.Option(min=1, help="Maximum changed source lines.")] = 400,
    as_json: Json = False,
) -> None:
    """Turn commits that change code and its tests into tasks, newest first.

    Stop with Ctrl-C. To continue, run the same command again.
    """
    sandboxes = _sandboxes(sandbox, options)
    order = MineOrder(
        repo,
        TaskFolder(out),
        count,
        jobs,
        revision,
        name,
        _split("--requires", requires),
        tuple(python_path or ()),
        tuple(source_path or ()),
        _split("--pytest", pytest),
        python,
        Limits(max_files, max_lines),
        dated="image" not in checked_options("sandboxes", sandbox, as_options(options or [])),
    )
    with _heard() as heard:
        made = finish(mine_tasks(order, sandboxes, judge_for(sandboxes, python), heard))
    _end(made, order.folder, count, as_json)


@app.command(
    "import", epilog="Example: rollart swe import lite.jsonl --mirror ./repos --out ./tasks"
)
def import_(
    file: Annotated[
        Path, typer.Argument(help=f"Rows of {', '.join(DATA_SETS)}: .jsonl, .parquet or .csv.")
    ],
    out: Out = Path("swe-tasks"),
    mirror: Annotated[
        Path | None,
        typer.Option(help="Folder of git repositories. Default: the rows' images, with docker."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Rows with this id or repository; * is allowed.")
    ] = None,
    jobs: Jobs = 2,
    sandbox: Sandbox = "bubblewrap",
    options: SandboxOptions = None,
    timeout: Timeout = None,
    validated: Annotated[
        bool, typer.Option("--validate/--no-validate", help="Judge gold and empty patches first.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Import rows of published data sets.

    Rows that cannot be run are listed with the reason, also in report.jsonl. To continue, or to try
    them again, run the same command again.
    """
    sandboxes = _sandboxes(sandbox, options)
    known = checked_options("sandboxes", sandbox, as_options(options or []))
    order = ImportOrder(
        file,
        TaskFolder(out),
        mirror,
        tuple(only or ()),
        jobs,
        timeout,
        has_images="image" in known,
        network=tuple(known.get("network", ())),
        is_validated=validated,
    )
    with _heard() as heard:
        imported = finish(import_tasks(order, sandboxes, heard))
    why_not = {_printable(name): _printable(why) for name, why in imported.why_not.items()}
    if as_json:
        told = {"rows": imported.num_rows, "tasks": imported.num_tasks, "why_not": why_not}
        print_json({"file": str(order.folder.tasks), **told})
    else:
        if why_not:
            print_table("Cannot be run", ("row", "why"), list(why_not.items()))
        typer.echo(f"{imported.num_tasks} of {imported.num_rows} rows are in {order.folder.tasks}")
    raise typer.Exit(1 if why_not else 0)


@app.command(epilog="Example: rollart swe validate ./tasks/tasks.jsonl --jobs 4")
def validate(
    file: Annotated[Path, typer.Argument(help="Task file, .jsonl or .parquet.")],
    repos_dir: Annotated[
        Path | None, typer.Option(help="Folder of the repositories. Default: repos next to FILE.")
    ] = None,
    jobs: Jobs = 2,
    sandbox: Sandbox = "bubblewrap",
    options: SandboxOptions = None,
    python: Python = "",
    timeout: Timeout = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write the rows here, with the gold_statuses of their gold patches."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge the gold patch and an empty patch of each task.

    Exit code 0 means that all gold patches are full and all empty patches are none. Files are in
    SWE-bench's or HumanEvalPack's format.
    """
    sandboxes = _sandboxes(sandbox, options)
    began = time.monotonic()
    with _heard() as heard:
        counted = _Counted(file, heard)
        work = validated(
            file,
            sandboxes,
            repos_dir=repos_dir,
            concurrency=jobs,
            python=python,
            timeout_s=timeout,
            on_row=counted,
        )
        verdicts = finish(work)
    if record is not None:
        record_statuses(file, verdicts, record)
    unsound = [verdict for verdict in verdicts if not verdict.is_sound]
    if as_json:
        wall_s = time.monotonic() - began
        rows = [{**asdict(verdict), "is_sound": verdict.is_sound} for verdict in verdicts]
        sound = len(verdicts) - len(unsound)
        print_json({"file": str(file), "sound": sound, "wall_s": wall_s, "rows": rows})
    else:
        if unsound:
            cells = [(_printable(v.name), v.gold, v.empty, _printable(v.why)) for v in unsound]
            print_table("Not sound", ("task", "gold", "empty", "why"), cells)
        typer.echo(f"{len(verdicts) - len(unsound)} of {len(verdicts)} tasks are sound: {file}")
    raise typer.Exit(1 if unsound else 0)


def _printable(text: str) -> str:
    """Return a row's text for any terminal, with halves of surrogate pairs as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Counted:
    """Reports each verdict as progress."""

    def __init__(self, file: Path, heard: Heard) -> None:
        self._name = file.name
        self._heard = heard
        # The number of rows of a Parquet file is not known without reading it.
        is_counted = file.suffix == ".jsonl" and file.is_file()
        lines = file.read_bytes().splitlines() if is_counted else []
        self._num_rows = sum(bool(line.strip()) for line in lines)
        self._num = self._num_sound = 0

    def __call__(self, verdict: Verdict) -> None:
        self._num += 1
        self._num_sound += verdict.is_sound
        why = "" if verdict.is_sound else _printable(f"; {verdict.name}: {verdict.why}")
        share = self._num / self._num_rows if self._num_rows else 0.0
        self._heard(f"{self._name}: {self._num_sound} of {self._num} sound{why}", share)


def _sandboxes(sandbox: str, options: list[str] | None) -> SandboxSource:
    """Return the source of sandboxes; reports wrong options before any work starts."""
    given = as_options(options or [])
    checked_options("sandboxes", sandbox, given)
    return sandbox_source({"id": sandbox, **given})


def _split(option: str, text: str) -> tuple[str, ...]:
    """Return the words of an option's value."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}; check the quotes") from None


@contextmanager
def _heard() -> Iterator[Heard]:
    """Show the progress on stderr."""
    with display(Console(stderr=True)) as shown:
        yield _telling(shown.phase, shown.progress)


def _telling(
    phase: Callable[[str], None], progress: Callable[[float | None, dict[str, str]], None]
) -> Heard:
    last = ""

    def heard(what: str, share: float | None) -> None:
        nonlocal last
        name, _, rest = what.partition(": ")
        if name != last:
            phase(name)
            last = name
        if share is not None:
            progress(share, {"": rest})

    return heard


def _end(made: Made, folder: TaskFolder, count: int, as_json: bool) -> None:
    """Print the result; exit with 1 if there are fewer tasks than requested."""
    if as_json:
        print_json(
            {
                "name": made.name,
                "tasks": made.num_tasks,
                "new": made.num_new,
                "file": str(folder.tasks),
                "outcomes": dict(made.outcomes),
                "notes": list(made.notes),
            }
        )
    else:
        rows = [(what, str(number)) for what, number in made.outcomes.items()]
        print_table(f"{made.name}: candidates", ("", ""), rows)
        typer.echo("\n".join((*made.notes, f"{made.num_tasks} tasks in {folder.tasks}")))
    if made.num_tasks < count:
        typer.echo(f"Only {made.num_tasks} of {count} tasks: no candidates are left.", err=True)
        raise typer.Exit(1)
