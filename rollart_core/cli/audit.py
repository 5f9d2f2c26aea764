"""``rollart audit``: the journal's account of every ticket of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollart_core.cli.output import plain, print_json, print_table
from rollart_core.errors import UserError


def audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Account for every ticket of a run, from its journal."""
    from rollart_core.engine.audit import audit as audited

    if not (run_dir / "journal.db").is_file():
        raise UserError(f"{run_dir} is no run directory: it has no journal.db")
    found = audited(run_dir)
    if as_json:
        print_json(found.as_dict())
    else:
        account = {k: v for k, v in found.as_dict().items() if k not in ("ok", "violations")}
        rows = [(name.replace("_", " "), plain(value) or "-") for name, value in account.items()]
        print_table(f"{run_dir}", ("", ""), rows)
        typer.echo("\n".join(f"Broken: {v}" for v in found.violations) or "No promise was broken.")
    if not found.ok:
        raise typer.Exit(1)
