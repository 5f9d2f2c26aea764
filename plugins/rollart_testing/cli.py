"""``rollart check``: check a plugin, a project or a wheel against its contract.

Takes: an id, a project folder or a wheel. Gives: every check with its outcome, and exit code 0 only
if no check failed and one passed. Never: imports a project or a wheel into this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rollart_core.cli.options import as_options
from rollart_core.cli.output import print_json, stdout_console
from rollart_core.plugins.manager import CORE
from rollart_testing.check.own_tests import OWN_TESTS
from rollart_testing.check.report import Report, Result
from rollart_testing.check.run import TIMEOUT_S, run
from rollart_testing.results import CheckOutcome


def check_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ID|PATH",
            help="An id, an alias, module:Class, ADAPTER::FOREIGN_ID, a project folder or a wheel.",
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the plugin."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only these groups (static, runtime, semantic) or checks, separated by commas."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit in seconds for the checks of one plugin.")
    ] = TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether a plugin, a project or a wheel follows the plugin contracts.

    The page "Checks" of the documentation explains each check and how to fix its findings.
    """
    with _progress() as heard:
        report = run(
            target,
            only=only or (),
            options=as_options(options or []),
            timeout_s=timeout,
            heard=heard,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
        if not only and report.distribution not in ("", CORE) and not _ran_own_tests(report):
            typer.echo("The tests of its package did not run: give the project folder to run them.")
    raise typer.Exit(0 if report.passed else 1)


@contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    """Show progress on a terminal's stderr; it is cleared when the block ends."""
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda plugin_id, what: progress.update(task, description=f"{plugin_id}: {what}")


def _show(report: Report) -> None:
    console = stdout_console()
    for plugin_id in dict.fromkeys(result.id for result in report.results):
        console.print(_table(plugin_id, [r for r in report.results if r.id == plugin_id]))
    failed = [r.name for r in report.results if r.outcome is CheckOutcome.FAIL]
    why = ", ".join(failed) or "no check passed for some id"
    said = ", ".join(f"{n} {outcome}" for outcome, n in report.counts.items())
    verdict = "passed" if report.passed else f"did not pass: {why}"
    typer.echo(f"{said}. {report.title} {verdict}.")


def _ran_own_tests(report: Report) -> bool:
    return any(result.name == OWN_TESTS for result in report.results)


def _table(plugin_id: str, results: Sequence[Result]) -> Table:
    table = Table(title=plugin_id, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("", "check", "outcome"):
        table.add_column(column, no_wrap=True)
    table.add_column("reason", overflow="fold", ratio=1)
    for result in results:
        table.add_row(result.group, result.name, _STYLED[result.outcome], result.reason)
    return table


_STYLED = {
    CheckOutcome.PASS: Text("PASS", "green"),
    CheckOutcome.FAIL: Text("FAIL", "bold red"),
    CheckOutcome.SKIP: Text("SKIP", "yellow"),
}
