"""``rollart registry keygen``, ``publish``, ``yank``, ``renew``: for who owns packages.

Takes: a package or an id, and the owner's key. Gives: a signed submission, for the operator to
accept. Never: changes what people see; only ``accept`` does.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.output import print_json, visible
from rollart_core.errors import RegistryError
from rollart_registry.cli.options import (
    URL,
    FingerprintOption,
    JsonOption,
    KeyOption,
    OwnerNameOption,
    RegistryOption,
    RootOption,
    ToOption,
    YesOption,
    app,
    days_option,
    new_passphrase,
    release_line,
    run_check,
    signer_at,
    trusted_registry,
)

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from rollart_registry.client import RegistryClient
    from rollart_registry.submission import Owner


@app.command(epilog="Example: rollart registry keygen acme.key")
def keygen(
    path: Annotated[
        Path, typer.Argument(help="The private key's file; PATH.pub is the public one.")
    ],
) -> None:
    """Make an owner's key pair."""
    from rollart_registry.keys import make_key, public_file

    public = make_key(path, new_passphrase())
    typer.echo(f"Made {path} (keep it to yourself) and {public_file(path)} (for the operator).")
    typer.echo(f"Key id: {public.keyid}")


@app.command(
    epilog="Example: rollart registry publish ./acme-maze --registry ./our-registry --key acme.key"
)
def publish(
    path: Annotated[Path, typer.Argument(metavar="WHEEL|PROJECT", help="What to publish.")],
    key: KeyOption,
    registry: RegistryOption = None,
    owner: OwnerNameOption = None,
    to: ToOption = None,
    days: Annotated[float, days_option("How long the owner's signature holds.")] = 365,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a package and hand it in, signed; the operator then accepts it."""
    from rollart_registry import submission
    from rollart_registry.build import wheel_of
    from rollart_registry.client import opened
    from rollart_registry.wheel import read_wheel

    trusted = trusted_registry(registry, root, fingerprint, yes)
    signer = signer_at(key)
    with TemporaryDirectory() as work:
        wheel = read_wheel(wheel_of(path, Path(work)))
        with opened(trusted) as client:
            publisher = _owner(client, signer, owner, to)
            publisher.days = days
            release = submission.publish(client, publisher, wheel, run_check)
    if as_json:
        print_json({"submission": str(publisher.folder), "release": release.as_dict()})
        return
    typer.echo(visible(f"Handed in {release}: {', '.join(release.ids)}; check {release.check}."))
    typer.echo(f"It is in {publisher.folder}; the operator makes it public with accept.")


@app.command(
    epilog=f"Example: rollart registry yank acme/Maze-v1@1.0.0 --reason 'leaks the answer' "
    f"--registry {URL} --key acme.key"
)
def yank(
    plugin_id: Annotated[str, typer.Argument(metavar="ID@VERSION", help="Which version.")],
    key: KeyOption,
    reason: Annotated[str, typer.Option(help="What people are told.")] = "",
    undo: Annotated[bool, typer.Option(help="Take a yank back.")] = False,
    registry: RegistryOption = None,
    to: ToOption = None,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
) -> None:
    """Hand in that nobody should install a version any more; who pinned it still can."""
    from rollart_registry import submission
    from rollart_registry.client import opened
    from rollart_registry.names import parse_wanted

    wanted = parse_wanted(plugin_id)
    if wanted.version is None:
        raise RegistryError(f"name the version to yank: {plugin_id}@1.0.0")
    if not reason and not undo:
        raise RegistryError("say why: --reason TEXT")
    with opened(trusted_registry(registry, root, fingerprint, yes)) as client:
        publisher = _owner(client, signer_at(key), wanted.owner, to)
        changed = submission.yank(client, publisher, wanted, None if undo else reason)
    typer.echo(f"Handed in: {', '.join(map(release_line, changed))}; the operator makes it public.")


@app.command(epilog=f"Example: rollart registry renew --registry {URL} --key acme.key")
def renew(
    key: KeyOption,
    registry: RegistryOption = None,
    owner: OwnerNameOption = None,
    to: ToOption = None,
    days: Annotated[float, days_option("How long the new signature holds.")] = 365,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
) -> None:
    """Sign an owner's releases anew, before the owner's signature expires."""
    from rollart_registry import submission
    from rollart_registry.client import opened

    with opened(trusted_registry(registry, root, fingerprint, yes)) as client:
        publisher = _owner(client, signer_at(key), owner, to)
        publisher.days = days
        submission.renew(client, publisher)
    typer.echo(f"Handed in a new signature of {publisher.name}; the operator makes it public.")


def _owner(
    client: RegistryClient, signer: CryptoSigner, name: str | None, to: Path | None
) -> Owner:
    from rollart_registry.fetcher import local_folder
    from rollart_registry.submission import Owner, owner_of_key
    from rollart_registry.tree import RegistryTree

    folder = local_folder(client.base)
    if to is None and folder is None:
        raise RegistryError(
            f"{client.base} is read only: give --to FOLDER, and send that to its operator"
        )
    submissions = to or RegistryTree(folder or Path()).submissions
    return Owner(owner_of_key(client, signer, name), signer, submissions)
