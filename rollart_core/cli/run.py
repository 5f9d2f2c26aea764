"""``rollart run``: train with a config file.

Takes: a config file with overrides, or a run to resume. Gives: progress, the final table or JSON,
an exit code. Never: trains itself; ``runtime/launch.py`` does.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollart_core.cli.output import print_json, print_table, stdout_console, visible
from rollart_core.cli.progress import display, report_table
from rollart_core.config.load import RECORD_KEY, read_yaml
from rollart_core.config.resolve import ResolvedRun
from rollart_core.config.validation.plugins import config_warnings
from rollart_core.errors import ConfigError
from rollart_core.store.journal_schema import FILE as JOURNAL
from rollart_core.suggestions import no_run

if TYPE_CHECKING:
    from rollart_core.runtime.prepare import TaskPreview

AUTO = Path("auto")
"""Value of ``--resume`` that selects the run by its name."""
_MAX_SHOWN = 1000
"""Number of characters of a task that the dry run prints."""


def run(
    config: Annotated[
        str | None, typer.Argument(help="Config file. Omit it with --resume.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config without starting the run.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Continue the run in this directory. `auto` with a config file: the newest run "
            "of its name in its runs_dir, or a new run if there is none.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object. Progress goes to stderr.")
    ] = False,
) -> None:
    """Train a policy as a config file describes."""
    console = Console(stderr=True) if as_json else stdout_console()
    if resume == AUTO and config is not None:
        resume = _newest(config, overrides or [])
        config = None if resume else config
        console.print(f"Continues {resume}" if resume else "Starts a new run")
    path, settings = _arguments(config, overrides or [], resume)
    from rollart_core.runtime.prepare import prepare

    resolved = prepare(path, settings, import_classes=dry_run, makes_folder=resume is None)
    if resume:
        from rollart_core.store.resume import check_resume

        check_resume(resume, resolved.as_dict())
        _show_changes(console, path, resolved)
    for line in config_warnings(resolved.config, resolved.config.algorithm.id):
        typer.echo(f"Warning: {line}", err=True)
    if dry_run:
        _show(path, resolved, as_json)
        return

    from rollart_core.runtime.interrupts import EXIT_CODES
    from rollart_core.runtime.launch import launch

    with display(console) as observer:
        report = launch(resolved, resume=resume.resolve() if resume else None, observer=observer)
    if as_json:
        print_json(report.as_dict())
    else:
        console.print(report_table(report.as_dict()))
    if not report.ok:
        typer.echo(f"Error: the run stopped: {report.stop_reason}", err=True)
        raise typer.Exit(EXIT_CODES.get(report.stop_reason, 1))


def _arguments(
    config: str | None, overrides: list[str], resume: Path | None
) -> tuple[Path, list[str]]:
    """Return the config file and the overrides; with --resume, all arguments are overrides."""
    if resume is None:
        if config is None:
            raise typer.BadParameter("give a config file, or a run directory with --resume")
        if (Path(config) / JOURNAL).is_file():
            raise ConfigError(f"{config} is a run directory: use `rollart run --resume {config}`")
        return Path(config), overrides
    given = ([config] if config else []) + overrides
    files = [argument for argument in given if "=" not in argument]
    if files:
        raise ConfigError(f"--resume uses the config of the run: remove {files[0]}")
    path = resume / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"--resume: {no_run(resume, path.name)}")
    from rollart_core.store.resume import settings_before

    return path, [*settings_before(read_yaml(path)), *given]


def _newest(config: str, overrides: list[str]) -> Path | None:
    """Return the directory of the run that ``--resume auto`` continues."""
    from rollart_core.config.load import load_config
    from rollart_core.store.run_dir import newest_run

    given = load_config(config, overrides)
    return newest_run(given.runs_dir, given.name)


def _show_changes(console: Console, path: Path, resolved: ResolvedRun) -> None:
    """Print the plugins whose version differs from that at the start of the run."""
    recorded = read_yaml(path).get(RECORD_KEY) or {}
    for name, now in resolved.as_dict()[RECORD_KEY].items():
        if recorded.get(name, now) != now:
            console.print(f"Note: {name} is now {now}; the run started with {recorded[name]}.")


def _show(path: Path, resolved: ResolvedRun, as_json: bool) -> None:
    from rollart_core.runtime.prepare import preview_tasks

    previews = preview_tasks(resolved, path)
    if as_json:
        tasks = {one.env: asdict(one) for one in previews}
        print_json({"ok": True, "config": resolved.as_dict(), "tasks": tasks})
        return
    rows = [(p.kind, p.spec.id, f"{p.distribution} {p.version}") for p in resolved.plugins]
    print_table(f"{path} can run", ("kind", "id", "from"), rows)
    for one in previews:
        _show_tasks(one)
    if getattr(resolved.config.runtime, "address", None):
        typer.echo("Files, programs and sandboxes on its nodes are checked at the start.")


def _show_tasks(one: TaskPreview) -> None:
    """Print the number of tasks of each split, and the first task as the policy reads it."""
    from rollart_core.rollout.episode import as_text

    counts = (f"{split} {'no end' if n is None else n}" for split, n in one.num_tasks.items())
    typer.echo(f"Tasks of {one.env}: {', '.join(counts)}")
    for note in one.notes:
        typer.echo(f"Note: {note}")
    typer.echo(f"The first task of {next(iter(one.num_tasks))}:")
    typer.echo(textwrap.indent(visible(as_text(one.example))[:_MAX_SHOWN], "  "))
