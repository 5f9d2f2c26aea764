"""``rollart diagnose``: what happened in a run, and what to change.

Takes: a run directory, of a run that has ended or goes on. Gives: text or JSON. Never: judges;
:mod:`rollart_view.diagnosis.diagnose` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.output import print_json, visible

if TYPE_CHECKING:
    from rollart_view.diagnosis.findings import Diagnosis, Finding


def diagnose(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what happened in a run, with the evidence and the config keys to change.

    Reads the journal only: also while the run goes on, and after it was killed.

    Example: rollart diagnose runs/webshop-20260101-120000
    """
    from rollart_view.diagnosis.diagnose import diagnose as diagnosed

    found = diagnosed(run_dir)
    if as_json:
        print_json(found.as_dict())
        return
    for line in _lines(found):
        typer.echo(visible(line))


def _lines(found: Diagnosis) -> Iterator[str]:
    versions = f", policy_version {found.first_version} to {found.last_version}"
    batches = f"{found.num_batches:,} batches{versions if found.num_batches else ''}"
    yield f"{found.run_dir}: {batches}"
    yield f"Ended: {found.ended}" if found.ended else "The run goes on, or was cut off."
    yield from found.summary
    yield ""
    if found.too_short:
        yield f"Too short for findings: they need at least {found.num_needed} batches."
    elif not found.findings:
        yield "No finding."
    for finding in found.findings:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    versions = f"policy_version {finding.first_version} to {finding.last_version}"
    yield f"{finding.severity}: {finding.kind}, {versions}"
    yield from (f"  {sentence}" for sentence in finding.evidence)
    yield "  Change:"
    width = max(len(advice.key) for advice in finding.keys)
    yield from (f"    {a.key:{width}}  {a.suggestion}" for a in finding.keys)
    yield ""
