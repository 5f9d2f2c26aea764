"""``rollart registry``: publish to a community registry, install from one, or run one.

    to run one   init, add-owner, accept, refresh, build-site
    to own       keygen, publish, yank, renew
    to use one   search, info, install, sync, verify

Takes: a registry's folder or a trusted registry, keys, packages, ids, a lock. Gives: a tree that
any web server can serve; signed submissions, which become public with ``accept``; installed
packages that were verified, shown and confirmed. Never: imports TUF or cryptography before a
command runs, prints a private key, or installs anything before the user has confirmed it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.output import print_json, print_table, visible
from rollart_core.errors import RegistryError
from rollart_registry.options import (
    URL,
    FingerprintOption,
    FolderOption,
    JsonOption,
    KeyOption,
    KeysOption,
    LockOption,
    OwnerNameOption,
    PythonOption,
    RegistryOption,
    RootOption,
    ToOption,
    YesOption,
    app,
    ask,
    confirm,
    days_option,
    new_passphrase,
    number_of,
    release_line,
    run_check,
    signer_at,
    trusted_registry,
)

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from rollart_registry.client import RegistryClient
    from rollart_registry.interpreter import TargetInterpreter
    from rollart_registry.operator import Operator
    from rollart_registry.plan import Plan
    from rollart_registry.release import Release
    from rollart_registry.submission import Owner


@app.command(epilog="Example: rollart registry init ./our-registry --timestamp-days 7")
def init(
    folder: Annotated[Path, typer.Argument(metavar="REGISTRY", help="The folder to create.")],
    keys: KeysOption = None,
    root_keys: Annotated[int, typer.Option(min=1, help="Number of root keys to create.")] = 1,
    root_threshold: Annotated[
        int, typer.Option(min=1, help="Number of keys that must sign root.")
    ] = 1,
    root_days: Annotated[float, days_option("Days until root expires after it is signed.")] = 365,
    targets_days: Annotated[
        float, days_option("Days until the signed list of owners expires.")
    ] = 365,
    snapshot_days: Annotated[float, days_option("Days until a snapshot expires.")] = 30,
    timestamp_days: Annotated[float, days_option("Days until a timestamp expires.")] = 7,
    as_json: JsonOption = False,
) -> None:
    """Create a registry's keys and empty, signed files that any web server can serve."""
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
    name: Annotated[str, typer.Argument(help="The owner's name, which is also its namespace.")],
    key: Annotated[list[Path], typer.Option(help="A public key of the owner. Can be repeated.")],
    keys: KeysOption = None,
    update: Annotated[bool, typer.Option(help="Replace the keys of an existing owner.")] = False,
) -> None:
    """Allow the holder of a key to publish under a namespace."""
    from rollart_registry.keys import load_public

    public = [load_public(path) for path in key]
    _operator(folder, keys).add_owner(name, public, update=update)
    typer.echo(f"{name}/* belongs to {', '.join(k.keyid[:16] for k in public)}.")


@app.command(epilog="Example: rollart registry accept ./our-registry")
def accept(
    folder: FolderOption,
    keys: KeysOption = None,
    submissions: Annotated[
        Path | None,
        typer.Option(help="The folder of submissions. Default: the one in the registry."),
    ] = None,
    recheck: Annotated[
        bool,
        typer.Option(help="Also run `rollart check` here, which runs the code of the packages."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify owners' submissions and publish them."""
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
            typer.echo("There are no submissions.")
    if any(outcome.refused is not None for outcome in outcomes):
        raise typer.Exit(1)


@app.command(epilog="Example: rollart registry refresh ./our-registry")
def refresh(
    folder: FolderOption,
    keys: KeysOption = None,
    role: Annotated[
        str, typer.Option(help="Sign up to this role: timestamp, snapshot, targets or root.")
    ] = "snapshot",
    timestamp_days: Annotated[
        float | None,
        days_option("Days until new timestamps expire."),
    ] = None,
    snapshot_days: Annotated[
        float | None,
        days_option("Days until new snapshots expire."),
    ] = None,
) -> None:
    """Renew signatures before they expire, for example in a cron job."""
    if role not in {"timestamp", "snapshot", "targets", "root"}:
        raise RegistryError(f"{role!r} is not a role: give timestamp, snapshot, targets or root")
    operator = _operator(folder, keys)
    given = {"timestamp": timestamp_days, "snapshot": snapshot_days}
    operator.set_validity({name: days for name, days in given.items() if days is not None})
    if role == "root":
        operator.refresh_root()
    if role in {"targets", "root"}:
        operator.refresh_targets()
    until = operator.refresh(snapshot=role != "timestamp")
    typer.echo(f"The timestamp is valid until {until:%Y-%m-%d %H:%M} UTC.")


@app.command(epilog=f"Example: rollart registry build-site --registry {URL} --out ./site")
def build_site(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    registry: RegistryOption = None,
    title: Annotated[str, typer.Option(help="The title of the pages.")] = "RollArt registry",
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
) -> None:
    """Write static pages for browsing a registry."""
    from rollart_registry.client import opened
    from rollart_registry.operator import build_site as built

    with opened(trusted_registry(registry, root, fingerprint, yes)) as client:
        pages = built(client, out, title)
    typer.echo(f"Wrote {number_of(len(pages), 'page')}: {pages[0]}")


def _operator(folder: Path, keys: Path | None) -> Operator:
    from rollart_registry.operator import Operator
    from rollart_registry.tree import RegistryTree

    resolved = folder.resolve()
    return Operator(RegistryTree(folder), keys or resolved.with_name(f"{resolved.name}-keys"), ask)


@app.command(epilog="Example: rollart registry keygen acme.key")
def keygen(
    path: Annotated[
        Path,
        typer.Argument(help="The file for the private key. The public key is written to PATH.pub."),
    ],
) -> None:
    """Create an owner's key pair."""
    from rollart_registry.keys import make_key, public_file

    public = make_key(path, new_passphrase())
    typer.echo(f"Made {path} (keep it private) and {public_file(path)} (for the operator).")
    typer.echo(f"Key id: {public.keyid}")


@app.command(
    epilog="Example: rollart registry publish ./acme-maze --registry ./our-registry --key acme.key"
)
def publish(
    path: Annotated[
        Path, typer.Argument(metavar="WHEEL|PROJECT", help="The wheel or project to publish.")
    ],
    key: KeyOption,
    registry: RegistryOption = None,
    owner: OwnerNameOption = None,
    to: ToOption = None,
    days: Annotated[float, days_option("Days until the owner's signature expires.")] = 365,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check and sign a package, and submit it for the operator to accept."""
    from rollart_registry import submission
    from rollart_registry.client import opened
    from rollart_registry.wheel import read_wheel, wheel_of

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
    plugin_id: Annotated[str, typer.Argument(metavar="ID@VERSION", help="The version to yank.")],
    key: KeyOption,
    reason: Annotated[str, typer.Option(help="The reason to show to users.")] = "",
    undo: Annotated[bool, typer.Option(help="Undo an earlier yank.")] = False,
    registry: RegistryOption = None,
    to: ToOption = None,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
) -> None:
    """Request that a version be yanked, so that it is installed only if it is pinned."""
    from rollart_registry import submission
    from rollart_registry.client import opened
    from rollart_registry.names import parse_wanted

    wanted = parse_wanted(plugin_id)
    if wanted.version is None:
        raise RegistryError(f"name the version to yank: {plugin_id}@1.0.0")
    if not reason and not undo:
        raise RegistryError("a yank needs a reason: --reason TEXT")
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
    days: Annotated[float, days_option("Days until the new signature expires.")] = 365,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
) -> None:
    """Renew the signatures of an owner's releases before they expire."""
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
            f"{client.base} is read-only: give --to FOLDER, and send that folder to its operator"
        )
    submissions = to or RegistryTree(folder or Path()).submissions
    return Owner(owner_of_key(client, signer, name), signer, submissions)


@app.command(epilog=f"Example: rollart registry search maze --registry {URL}")
def search(
    words: Annotated[list[str] | None, typer.Argument(help="Words that must all be found.")] = None,
    registry: RegistryOption = None,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find packages by words in their names, ids and summaries."""
    from rollart_registry.client import opened

    with opened(trusted_registry(registry, root, fingerprint, yes)) as client:
        newest = {r.distribution: r for r in client.releases() if r.yanked is None}
        refused = client.refused
    found = [r for r in newest.values() if all(w.lower() in _text(r) for w in words or ())]
    if as_json:
        print_json({"releases": [r.as_dict() for r in found], "refused": refused})
        return
    for owner, reason in refused.items():
        typer.echo(visible(f"Not shown: {owner}: {reason}"), err=True)
    rows = [(i.id, r.version, i.summary or r.summary, r.licence) for r in found for i in r.provides]
    if rows:
        print_table("", ("id", "version", "what", "licence"), rows)
    else:
        typer.echo("Nothing matches." if words else "The registry is empty.")


@app.command(epilog=f"Example: rollart registry info acme/Maze-v1 --registry {URL}")
def info(
    plugin_id: Annotated[str, typer.Argument(metavar="ID[@VERSION]", help="The package to show.")],
    registry: RegistryOption = None,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a package's ids, requirements, entry points, check result and versions."""
    from rollart_registry.client import opened
    from rollart_registry.names import parse_wanted

    wanted = parse_wanted(plugin_id)
    with opened(trusted_registry(registry, root, fingerprint, yes)) as client:
        release = client.find(wanted, allow_yanked=True)
        others = [r for r in client.releases_of(wanted.owner) if wanted.id in r.ids]
    if as_json:
        print_json(release.as_dict() | {"versions": [_version(r) for r in others]})
        return
    print_table(str(release), ("", ""), _facts(release))
    print_table("versions", ("", "", ""), [tuple(_version(r).values()) for r in reversed(others)])


@app.command(epilog=f"Example: rollart registry install acme/Maze-v1@1.0.0 --registry {URL}")
def install(
    plugin_id: Annotated[
        str, typer.Argument(metavar="ID[@VERSION]", help="The package to install.")
    ],
    registry: RegistryOption = None,
    python: PythonOption = None,
    lock: LockOption = Path("rollart.lock"),
    lock_all: Annotated[
        bool,
        typer.Option(
            help="Also lock installed packages, so that the lock can fill an empty environment."
        ),
    ] = False,
    allow_yanked: Annotated[bool, typer.Option(help="Allow a yanked version.")] = False,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what will run, ask to confirm, install a verified package, and write a lock file."""
    from rollart_registry import install as installing
    from rollart_registry.client import opened
    from rollart_registry.names import parse_wanted
    from rollart_registry.plan import make_plan

    wanted = parse_wanted(plugin_id)
    if as_json and not yes:
        raise RegistryError("--json cannot ask for confirmation: add --yes, or leave --json out")
    trusted = trusted_registry(registry, root, fingerprint, yes)
    interpreter = _interpreter(python)
    with opened(trusted) as client:
        plan = make_plan(client, wanted, interpreter, allow_yanked=allow_yanked, lock_all=lock_all)
        if not as_json:
            _show_plan(plan, interpreter.python)
        if not yes:
            confirm(
                "Install?",
                "nothing was installed; --yes skips this question (--fingerprint and --root "
                "confirm the registry, not its packages)",
            )
        written = installing.install(plan, trusted, interpreter, lock)
    if as_json:
        print_json(plan.as_dict() | {"lock": str(lock)})
    else:
        typer.echo(f"Installed {', '.join(str(r) for r, _ in plan.releases)}.")
        typer.echo(f"{lock} has {number_of(len(written.packages), 'package')}, each with its hash.")


@app.command(epilog="Example: rollart registry sync --lock rollart.lock --python .venv/bin/python")
def sync(
    lock: LockOption = Path("rollart.lock"),
    python: PythonOption = None,
    allow_drift: Annotated[
        bool,
        typer.Option(
            help="Allow other versions of packages that were installed when the lock was written."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Has no effect: sync asks no question.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Install exactly the packages listed in a lock file, without a question."""
    from rollart_registry.install import sync as synced
    from rollart_registry.lock import read_lock

    done = synced(read_lock(lock), _interpreter(python), allow_drift=allow_drift)
    if as_json:
        print_json({"installed": list(done)})
    else:
        typer.echo(f"Installed {', '.join(done)}." if done else "Everything is installed already.")


@app.command(epilog="Example: rollart registry verify --lock rollart.lock")
def verify(
    registry: Annotated[
        str | None,
        typer.Argument(
            metavar="[REGISTRY]", help="A registry to verify instead of the installed packages."
        ),
    ] = None,
    lock: LockOption = Path("rollart.lock"),
    python: PythonOption = None,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Verify installed packages against a lock file, or the signatures of files in a registry."""
    from rollart_registry import verify as verifying
    from rollart_registry.client import opened
    from rollart_registry.install import trusted_by
    from rollart_registry.lock import read_lock

    if registry is not None:
        with opened(trusted_registry(registry, root, fingerprint, yes)) as client:
            good, wrong = verifying.verify_registry(client)
        said = f"{number_of(good, 'release')} verified: what was signed is what is there."
    else:
        locked = read_lock(lock)
        with opened(trusted_by(locked)) as client:
            wrong = verifying.verify_lock(client, locked, _interpreter(python))
        said = f"{number_of(len(locked.packages), 'package')} verified: as {lock} says."
    if as_json:
        print_json({"ok": not wrong, "differences": wrong})
    else:
        typer.echo("\n".join(f"Differs: {visible(line)}" for line in wrong) or said)
    if wrong:
        raise typer.Exit(1)


def _interpreter(python: Path | None) -> TargetInterpreter:
    from rollart_registry.interpreter import TargetInterpreter

    return TargetInterpreter.at(python)


def _text(release: Release) -> str:
    provided = [f"{p.id} {p.summary}" for p in release.provides]
    return " ".join([release.distribution, release.summary, *provided]).lower()


def _version(release: Release) -> dict[str, str]:
    yanked = "" if release.yanked is None else f"yanked: {release.yanked}"
    return {"version": release.version, "published": release.published, "yanked": yanked}


def _facts(release: Release) -> list[tuple[str, str]]:
    return [
        ("provides", "\n".join(f"{p.id}  {p.summary}" for p in release.provides)),
        ("runs", "\n".join(f"{g}: {name} = {value}" for g, name, value in release.entry_points)),
        ("needs", "\n".join(release.needs) or "nothing"),
        ("licence", release.licence),
        ("check", str(release.check)),
        ("owner", release.owner),
        ("published", release.published),
        ("sha256", release.sha256),
        *([("yanked", release.yanked)] if release.yanked is not None else []),
    ]


def _show_plan(plan: Plan, python: str) -> None:
    for release, _ in plan.releases:
        print_table(str(release), ("", ""), _facts(release))
    rows = [(p.name, p.version, p.sha256[:16] + "…") for p in plan.pinned]
    if rows:
        print_table("from your index", ("", "", ""), rows)
    if plan.replaces:
        typer.echo(visible(f"Replaces {', '.join(plan.replaces)}."))
    typer.echo(f"Into {python}.")
