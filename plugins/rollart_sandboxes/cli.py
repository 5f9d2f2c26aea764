"""``rollart sandbox``: list sandboxes, remove what killed runs left, and test sandbox types.

Takes: the ledger of sandboxes, and the installed sandbox types. Gives: tables or JSON. Never:
changes a sandbox whose owner is alive.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.options import as_options
from rollart_core.cli.output import print_columns, print_json, print_table
from rollart_core.plugins.old_names import REMOVED_IN

if TYPE_CHECKING:
    from rollart_core.contracts.host import Finding
    from rollart_sandboxes.pool.doctor import SandboxDiagnosis
    from rollart_sandboxes.pool.live import SandboxRecord

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SIGNS = {"ok": "ok", "warn": "less", "bad": "no"}


@app.callback(epilog="Example: rollart sandbox doctor")
def sandbox() -> None:
    """List live sandboxes, remove those of killed runs, and test which types work here."""


@app.command("list", epilog="Example: rollart sandbox list --json")
def list_sandboxes(as_json: Json = False) -> None:
    """List the sandboxes of all your runs on this machine."""
    from rollart_core.rollout import loop
    from rollart_sandboxes.pool.live import LiveSandboxes, live_sandboxes

    now = time.time()
    found = loop.run(live_sandboxes(LiveSandboxes()))
    if as_json:
        print_json({"sandboxes": [_as_dict(record, now) for record in found]})
        return
    if not found:
        typer.echo("There are no sandboxes on this machine.")
        return
    columns = ("sandbox", "id", "owner", "run", "state", "age", "time left", "memory")
    print_columns(f"Sandboxes: {len(found)}", columns, [_row(record, now) for record in found])
    if any(record.is_orphan for record in found):
        typer.echo("The owners of orphans are gone. `rollart sandbox gc` removes what they left.")


@app.command("gc", epilog="Example: rollart sandbox gc")
def collect_garbage(as_json: Json = False) -> None:
    """Remove the containers, cgroups and folders that sandboxes of killed runs left behind."""
    from rollart_core.rollout import loop
    from rollart_sandboxes.pool import gc
    from rollart_sandboxes.pool.doctor import sandbox_types
    from rollart_sandboxes.pool.live import LiveSandboxes

    done = loop.run(gc.collect_garbage(LiveSandboxes(), sweep=sandbox_types()))
    if as_json:
        print_json(asdict(done))
    else:
        typer.echo("\n".join(f"Removed {what}." for what in done.removed) or "Nothing to remove.")
        for what in done.unasked:
            typer.echo(f"Not checked: {what}")
        for what in done.failed:
            typer.echo(f"Not removed: {what}", err=True)
    if done.failed:
        raise typer.Exit(1)


@app.command("reap", hidden=True)
def _reap(as_json: Json = False) -> None:
    """Run `gc`. `reap` is its old name, which works until RollArt 0.3."""
    renamed = f"`rollart sandbox reap` is now `rollart sandbox gc`; RollArt {REMOVED_IN} removes it"
    typer.echo(renamed, err=True)
    collect_garbage(as_json)


@app.command(epilog="Example: rollart sandbox doctor docker image=python:3.12-slim")
def doctor(
    name: Annotated[
        str | None, typer.Argument(help="The type of sandbox to test. Default: all.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the sandbox."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a sandbox of each type, report which types work, and say how to fix the others.

    The exit code is 0 if at least one type that isolates code (or the named one) works.
    """
    from rollart_core.rollout import loop
    from rollart_sandboxes.pool.doctor import diagnose, machine, sandbox_types

    chosen = as_options(options or [])
    names = [name] if name else sandbox_types()
    here = machine()
    found = [loop.run(diagnose(one, chosen)) for one in names]
    works = any(one.works and (one.isolates or bool(name)) for one in found)
    if as_json:
        types_found = [asdict(one) for one in found]
        print_json({"works": works, "machine": list(map(asdict, here)), "sandboxes": types_found})
    else:
        _show("this machine", here)
        for one in found:
            _show(_title(one), one.findings)
    if not works:
        raise typer.Exit(1)


def _title(found: SandboxDiagnosis) -> str:
    isolation = found.isolation if found.isolates else "no isolation"
    return f"{found.sandbox} ({isolation}): {'works' if found.works else 'does not work'}"


def _show(title: str, findings: Iterable[Finding]) -> None:
    rows = [(_SIGNS[f.state], f.what, f.says, f.mend) for f in findings]
    print_table(title, ("", "what", "finding", "remedy"), rows)


def _row(record: SandboxRecord, now: float) -> Sequence[str]:
    used = record.used_bytes
    memory = f"{'?' if used is None else used >> 20} of {record.reserve_bytes >> 20} MiB"
    left = "" if record.ttl_s is None else _span(record.opened_at + record.ttl_s - now)
    owner = f"{record.pid or '?'} ({'gone' if record.is_orphan else 'alive'})"
    age = _span(now - record.opened_at)
    return (
        _isolation_of(record),
        record.name,
        owner,
        record.run,
        _state(record),
        age,
        left,
        memory,
    )


def _isolation_of(record: SandboxRecord) -> str:
    """Return the short name of its sandbox type, if that type is installed here."""
    from rollart_core.errors import UserError
    from rollart_core.plugins import registry

    try:
        return registry.spec("sandboxes", record.sandbox).alias or record.sandbox
    except UserError:
        return record.sandbox


def _state(record: SandboxRecord) -> str:
    if record.is_orphan:
        return "orphan"
    if record.ready_at is None:
        return "starting"
    return "warm" if record.is_idle else "in use"


def _span(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _as_dict(record: SandboxRecord, now: float) -> dict[str, object]:
    left = None if record.ttl_s is None else record.opened_at + record.ttl_s - now
    return {
        "sandbox": record.sandbox,
        "id": record.name,
        "owner_pid": record.pid,
        "run": record.run,
        "state": _state(record),
        "age_s": now - record.opened_at,
        "ttl_left_s": left,
        "used_bytes": record.used_bytes,
        "reserve_bytes": record.reserve_bytes,
        "left": {kind: list(what) for kind, what in record.left.items()},
    }
