"""``rollart registry init``, ``add-owner``, ``accept``, ``refresh``, ``build-site``: to run one.

Takes: the registry's folder and the operator's keys. Gives: a tree that any web server can serve,
and what was accepted or refused. Never: prints a private key, or signs on top of what was changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.output import print_json, visible
from rollart_core.errors import RegistryError
from rollart_registry.cli.options import (
    URL,
    FingerprintOption,
    FolderOption,
    JsonOption,
    KeysOption,
    RegistryOption,
    RootOption,
    YesOption,
    app,
    ask,
    days_option,
    new_passphrase,
    number_of,
    release_line,
    run_check,
    trusted_registry,
)

if TYPE_CHECKING:
    from rollart_registry.operator import Operator


@app.command(epilog="Example: rollart registry init ./our-registry --timestamp-days 7")
def init(
    folder: Annotated[Path, typer.Argument(metavar="REGISTRY", help="The folder to make.")],
    keys: KeysOption = None,
    root_keys: Annotated[int, typer.Option(min=1, help="How many keys root has.")] = 1,
    root_threshold: Annotated[int, typer.Option(min=1, help="How many must sign root.")] = 1,
    root_days: Annotated[float, days_option("How long a signed root holds.")] = 365,
    targets_days: Annotated[float, days_option("How long signed owners hold.")] = 365,
    snapshot_days: Annotated[float, days_option("How long a snapshot holds.")] = 30,
    timestamp_days: Annotated[float, days_option("How long a timestamp holds.")] = 7,
    as_json: JsonOption = False,
) -> None:
    """Make a registry: its keys, and an empty signed tree that any web server can serve."""
    from rollart_registry.operator import Validity
    from rollart_registry.operator import init as made
    from rollart_registry.trust import fingerprint

    validity = Validity(root_days, targets_days, snapshot_days, timestamp_days)
    operator = _operator(folder, keys)
    root = made(
        operator,
        passphrase=new_passphrase(),
        root_keys=root_keys,
        root_threshold=root_threshold,
        validity=validity,
    )
    if as_json:
        print_json({"registry": str(folder), "keys": str(operator.keys), "root": fingerprint(root)})
        return
    typer.echo(f"Made {folder}, and its keys in {operator.keys} (never serve or share those).")
    typer.echo(f"Root fingerprint, for people to compare: {fingerprint(root)}")


@app.command(epilog="Example: rollart registry add-owner ./our-registry acme --key acme.key.pub")
def add_owner(
    folder: FolderOption,
    name: Annotated[str, typer.Argument(help="The owner, and the namespace of its ids.")],
    key: Annotated[list[Path], typer.Option(help="A public key of the owner; may be repeated.")],
    keys: KeysOption = None,
    update: Annotated[bool, typer.Option(help="Give an owner that exists these keys.")] = False,
) -> None:
    """Let whoever holds a key publish under a namespace."""
    from rollart_registry.keys import load_public

    public = [load_public(path) for path in key]
    _operator(folder, keys).add_owner(name, public, update=update)
    typer.echo(f"{name}/* belongs to {', '.join(k.keyid[:16] for k in public)}.")


@app.command(epilog="Example: rollart registry accept ./our-registry")
def accept(
    folder: FolderOption,
    keys: KeysOption = None,
    submissions: Annotated[
        Path | None, typer.Option(help="A folder of submissions, if not the registry's own.")
    ] = None,
    recheck: Annotated[
        bool, typer.Option(help="Run `rollart check` here too; it runs the packages' code.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify what owners handed in, and make it public."""
    from rollart_registry.accept import accept as accepted

    outcomes = accepted(_operator(folder, keys), submissions, run_check if recheck else None)
    if as_json:
        print_json(
            {
                "accepted": {
                    o.owner: [str(r) for r in (*o.added, *o.changed)]
                    for o in outcomes
                    if o.refused is None
                },
                "refused": {o.owner: o.refused for o in outcomes if o.refused is not None},
            }
        )
    else:
        for outcome in outcomes:
            if outcome.refused is None:
                what = ", ".join(map(release_line, (*outcome.added, *outcome.changed)))
                typer.echo(f"Accepted from {outcome.owner}: {what or 'a new signature'}.")
            else:
                typer.echo(visible(f"Refused from {outcome.owner}: {outcome.refused}"), err=True)
        if not outcomes:
            typer.echo("Nothing was handed in.")
    if any(outcome.refused is not None for outcome in outcomes):
        raise typer.Exit(1)


@app.command(epilog="Example: rollart registry refresh ./our-registry")
def refresh(
    folder: FolderOption,
    keys: KeysOption = None,
    role: Annotated[
        str, typer.Option(help="Up to which role: timestamp, snapshot, targets or root.")
    ] = "snapshot",
    timestamp_days: Annotated[
        float | None,
        days_option("How long timestamps hold from now on."),
    ] = None,
    snapshot_days: Annotated[
        float | None,
        days_option("How long snapshots hold from now on."),
    ] = None,
) -> None:
    """Sign anew before signatures expire; for cron."""
    if role not in {"timestamp", "snapshot", "targets", "root"}:
        raise RegistryError(f"{role!r} is no role: timestamp, snapshot, targets or root")
    operator = _operator(folder, keys)
    given = {"timestamp": timestamp_days, "snapshot": snapshot_days}
    operator.set_validity({name: days for name, days in given.items() if days is not None})
    if role == "root":
        operator.refresh_root()
    if role in {"targets", "root"}:
        operator.refresh_targets()
    until = operator.refresh(snapshot=role != "timestamp")
    typer.echo(f"The timestamp holds until {until:%Y-%m-%d %H:%M} UTC.")


@app.command(epilog=f"Example: rollart registry build-site --registry {URL} --out ./site")
def build_site(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    registry: RegistryOption = None,
    title: Annotated[str, typer.Option(help="Of the pages.")] = "RollArt registry",
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
) -> None:
    """Write static pages for people to browse a registry."""
    from rollart_registry.client import opened
    from rollart_registry.site import build_site as built

    with opened(trusted_registry(registry, root, fingerprint, yes)) as client:
        pages = built(client, out, title)
    typer.echo(f"Wrote {number_of(len(pages), 'page')}: {pages[0]}")


def _operator(folder: Path, keys: Path | None) -> Operator:
    from rollart_registry.operator import Operator
    from rollart_registry.tree import RegistryTree

    resolved = folder.resolve()
    return Operator(RegistryTree(folder), keys or resolved.with_name(f"{resolved.name}-keys"), ask)
