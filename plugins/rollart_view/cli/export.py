"""``rollart export``: trajectories for other tools.

Takes: a run directory and filters. Gives: a file. Never: writes over one that is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollart_core.cli.output import print_json


def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    to: Annotated[str, typer.Option("--to", help="jsonl, parquet or sharegpt.")] = "jsonl",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The file; it must not be there. None: the run's name, here.",
            show_default=False,
        ),
    ] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            "--status",
            help="finished, truncated or failed; may be repeated. None: all but failed.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="ENV", help="Name in the run, id or alias; may be repeated."),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Leave out what earned less.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids, masks and logprobs in jsonl too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the trajectories of runs to one file for other tools.

    Example: rollart export runs/hello-20260101-120000 --to sharegpt --min-reward 1
    """
    from rollart_view.export import ENDINGS, FORMATS, STATUSES, Filters
    from rollart_view.export import export as exported

    form: Any = _one_of("--to", to, FORMATS)
    statuses: Any = tuple(_one_of("--status", s, STATUSES) for s in status or ())
    if tokens and form != "jsonl":
        raise typer.BadParameter(f"--tokens: has no effect with --to {form}")
    filters = Filters(statuses or Filters().statuses, tuple(env or ()), min_reward)
    path = out or Path(runs[0].resolve().name + ENDINGS[form])
    account = exported(runs, form, path, filters, tokens=tokens)
    if as_json:
        print_json(account.as_dict())
        return
    typer.echo(f"{account.written} trajectories in {account.path}")
    for why, count in account.left_out.items():
        typer.echo(f"left out: {count} ({why})")


def _one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise typer.BadParameter(f"{option} {given}: must be one of {', '.join(known)}")
    return given
