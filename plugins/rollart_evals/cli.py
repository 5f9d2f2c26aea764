"""``rollart eval``: score models, endpoints and baselines on held-out tasks.

Takes: a config, a suite, a run directory, or an environment and a model. Gives: the report. Never:
trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group

from rollart_core.cli.output import print_json, stdout_console
from rollart_core.cli.progress import (
    as_float,
    display,
    interval,
    mapping,
    number,
    titled,
    two_columns,
)
from rollart_core.errors import ConfigError

if TYPE_CHECKING:
    from rollart_evals.prepare import EvalRequest, StartedEval
    from rollart_evals.table import Table


Config = Annotated[
    str | None,
    typer.Argument(help="A config file, a suite, or a run directory.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file."),
]
Env = Annotated[
    str | None, typer.Option("--env", metavar="ID", help="Environment, instead of a config file.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="M", help="A model folder, a hub id, or the URL of a server (…/v1)."
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="The name of the model on the server.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="PATH",
        help="The tokenizer of the served model, to send token ids instead of text (vLLM).",
    ),
]
Baseline = Annotated[
    list[str] | None,
    typer.Option("--baseline", metavar="B", help="oracle, noop or random. Can be repeated."),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="[LABEL=]DIR",
        help="Add the results of a finished run or evaluation to the table. Can be repeated.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for the results.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Continue this evaluation.")
]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object. Progress goes to stderr.")
]


def evaluate(
    config: Config = None,
    overrides: Overrides = None,
    env: Env = None,
    model: Model = None,
    name: Name = None,
    tokenizer: Tokenizer = None,
    baseline: Baseline = None,
    columns: Columns = None,
    out: Out = None,
    resume: Resume = None,
    as_markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Score models, OpenAI-compatible endpoints and baselines on held-out tasks."""
    from rollart_evals.prepare import EvalRequest
    from rollart_evals.table import Table, merged, read_table

    if as_markdown and as_json:
        raise typer.BadParameter("--markdown and --json: use only one of them")
    file = config if config and "=" not in config else None
    settings = [*([config] if config and not file else []), *(overrides or [])]
    others = [(text, read_table(text)) for text in columns or ()]
    asked = EvalRequest(file, settings, env, model, name, tokenizer, baseline or (), out, others)
    begun = _begun(asked, resume)
    if begun is None:
        _show_table(merged(Table(), others), as_markdown=as_markdown, as_json=as_json)
    elif not _play(begun, others, as_markdown=as_markdown, as_json=as_json):
        raise typer.Exit(1)


def _play(
    begun: StartedEval,
    others: Sequence[tuple[str, Table]],
    *,
    as_markdown: bool,
    as_json: bool,
) -> bool:
    """Run an evaluation and print its report; return whether it has no error."""
    from rollart_evals.run import run_evaluation
    from rollart_evals.table import merged

    console = Console(stderr=True) if as_json or as_markdown else stdout_console()
    with display(console) as observer:
        report = run_evaluation(begun.run, begun.plan, begun.folder, observer=observer)
    plain, table = report.as_dict(), merged(report.table(), others)
    if as_json:
        print_json(plain | ({"table": table.as_dict()} if others else {}))
    elif as_markdown:
        _show_table(table, as_markdown=True, as_json=False)
    else:
        console.print(evaluation_table(plain, table))
    for fault in report.faults:
        typer.echo(f"Error: {fault}", err=True)
    return report.ok


def _begun(asked: EvalRequest, resume: Path | None) -> StartedEval | None:
    """Return the evaluation to run; None if only other reports are shown."""
    from rollart_evals.prepare import begin, go_on

    if resume is not None:
        if asked.begins_anew:
            raise ConfigError("--resume continues an evaluation: remove everything except settings")
        return go_on(resume, asked.settings)
    if asked.config or (asked.env and (asked.model or asked.baselines)):
        return begin(asked)
    if asked.beside and not asked.begins_anew and not asked.settings:
        return None
    raise typer.BadParameter(
        "give a config file, a suite or a run directory, or --env with --model or --baseline"
    )


def _show_table(table: Table, *, as_markdown: bool, as_json: bool) -> None:
    from rollart_evals.table import markdown

    if as_json:
        print_json(table.as_dict())
    elif as_markdown:
        typer.echo(markdown(table))
    else:
        stdout_console().print(matrix(table))


def evaluation_table(report: Mapping[str, Any], table: Table) -> Group:
    """Return the results of an evaluation, from ``EvaluationReport.as_dict()``, and its table."""
    figures = titled("All figures")
    rewards = [_mean_rewards(cell) for cell in report["cells"]]
    more = ("reward",) if any(rewards) else ()
    for column in ("environment", "player", "success", "score", *more, "pass@k", "failed"):
        figures.add_column(column, overflow="fold")
    for cell, reward in zip(report["cells"], rewards, strict=True):
        passes = (f"@{k} {e['mean']:.1%}" for k, e in cell["pass_at"].items() if e["n"])
        intervals = [interval(cell[what], what) for what in ("success", "score")]
        own = (reward or "-",) if more else ()
        shown = (*intervals, *own, " ".join(passes) or "-", str(cell["failed"]))
        figures.add_row(cell["env"], cell["column"], *shown)
    facts = two_columns()
    failures, tokens = report["failures"], report["tokens"]
    spelled = ", ".join(f"{k} {v}" for k, v in failures.items())
    why = f" (most often: {report['why_failed']})" if spelled else ""
    facts.add_row("model", str(report["model"] or "none"))
    turns = number(as_float(report["mean_turns"]))
    facts.add_row("turns, truncated", f"{turns}, {report['truncated']}")
    facts.add_row("tokens", ", ".join(f"{v:,} {k}" for k, v in tokens.items()))
    facts.add_row("failed attempts", f"{spelled or 'none'}{why}")
    facts.add_row("time", f"{as_float(report['wall_s']):,.1f} s")
    facts.add_row("folder", str(report["run_dir"]))
    return Group(matrix(table), figures, facts)


def _mean_rewards(cell: Mapping[str, Any]) -> str:
    """Return the mean reward and components; empty if they are only the score again."""
    rewards = mapping(cell.get("rewards"))
    if not rewards or (list(rewards) == ["reward"] and rewards["reward"] == cell["score"]):
        return ""
    means = {name: as_float(mapping(mean).get("mean")) for name, mean in rewards.items()}
    return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())


def matrix(table: Table) -> Group:
    """Return a table of environments and players, with its notes."""
    from rollart_evals.table import notes, rows, titles

    shown = titled("Success on held-out tasks")
    for title in titles(table):
        shown.add_column(title, overflow="fold")
    for row in rows(table):
        shown.add_row(row[0].strip("`"), *row[1:])
    return Group(shown, *(f"- {note}" for note in notes(table)))
