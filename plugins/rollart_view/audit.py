"""``rollart audit``: account for every ticket of a run from its journal.

Takes: a run directory, of a finished or a live run. Gives: a table or JSON, and exit code 1 if an
invariant was violated. Never: writes to the journal, or judges it; ``store/audit.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.output import print_json, print_table

if TYPE_CHECKING:
    from rollart_core.store.audit import AuditReport

MOST_SHOWN = 20
"""Maximum number of violations that are printed; ``--json`` has all."""


def audit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report what happened to every ticket of a run. This also works while the run is in progress.

    The exit code is 1 if an invariant was violated.

    Example: rollart audit runs/webshop-20260101-120000
    """
    from rollart_core.store.audit import audit as audited

    found = audited(run_dir)
    if as_json:
        print_json(found.as_dict())
    else:
        print_table(f"{run_dir}", ("", "", ""), list(_rows(found)))
        for violation in found.violations[:MOST_SHOWN]:
            typer.echo(f"Violated: {violation}")
        if len(found.violations) > MOST_SHOWN:
            typer.echo(f"... and {len(found.violations) - MOST_SHOWN} more; --json shows all.")
        if found.ok:
            typer.echo("No invariant was violated.")
    if not found.ok:
        raise typer.Exit(1)


def _rows(found: AuditReport) -> Iterator[tuple[str, str, str]]:
    still = "still running or interrupted; --resume continues it"
    yield "ended", "", found.ended or still
    yield "tickets", f"{found.num_tickets}", ""
    yield "  trained", f"{found.trained}", "once each, in the history of the newest weights"
    yield from _kinds("  dropped", found.dropped)
    if found.discarded_by_guard:
        detail = "trained only in batches that the guard undid"
        yield "  discarded", f"{found.discarded_by_guard}", detail
    yield from _kinds("  aborted", found.aborted)
    yield from _kinds("  lost", found.lost)
    if found.open:
        yield "  open", f"{found.open}", "running, waiting, or to be repeated after a resume"
    yield "retried", f"{found.retried}", "tickets with another attempt after a failed one"
    yield "rolled back", f"{found.rolled_back}", "tickets in a batch that was undone"
    parts = " + ".join(f"{n} {outcome}" for outcome, n in found.outcomes.items() if n)
    yield "attempts", f"{found.attempts}", f"= {parts}" if parts else ""
    yield from _kinds("  failed", found.failures)
    if found.attempts_aborted:
        yield "  aborted", f"{found.attempts_aborted}", "cancelled while they ran"
    if found.unrecorded:
        why = "interrupted by a kill" if found.ended else "still running, or interrupted by a kill"
        yield "  unrecorded", f"{found.unrecorded}", why
    yield "batches", f"{found.batches}", f"and {found.batches_rolled_back} rolled back"
    for i, why in enumerate(found.guard):
        yield "guard tripped" if i == 0 else "", "", why
    for i, why in enumerate(found.went_back):
        yield "went back" if i == 0 else "", "", why
    versions = ", ".join(f"{v}: {n}" for v, n in found.staleness.items())
    bound = f"at most {found.staleness_bound}"
    yield "staleness", f"{found.max_staleness or 0}", f"{bound}; {versions}" if versions else bound
    bias = found.length_bias
    for what in ("tokens", "turns"):
        means = [bias[f"{name}_{what}_mean"] for name in ("dispatched", "finished")]
        trained = bias[f"trained_{what}_mean"]
        detail = f"of trained; dispatched {means[0]:.4g}, finished {means[1]:.4g}"
        yield f"mean {what}", f"{trained:.4g}", detail


def _kinds(name: str, counts: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    detail = ", ".join(f"{kind}: {n}" for kind, n in counts.items())
    yield name, f"{sum(counts.values())}", detail
