"""``rollart registry search``, ``info``, ``install``, ``sync``, ``verify``: to use one.

Takes: a registry that is trusted, ids, a lock. Gives: packages that were verified, shown and agreed
to, and what differs. Never: installs anything before the question was answered.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.output import print_json, print_table, visible
from rollart_core.errors import RegistryError
from rollart_registry.cli.options import (
    URL,
    FingerprintOption,
    JsonOption,
    LockOption,
    PythonOption,
    RegistryOption,
    RootOption,
    YesOption,
    app,
    confirm,
    number_of,
    trusted_registry,
)

if TYPE_CHECKING:
    from rollart_registry.interpreter import TargetInterpreter
    from rollart_registry.plan import Plan
    from rollart_registry.release import Release


@app.command(epilog=f"Example: rollart registry search maze --registry {URL}")
def search(
    words: Annotated[list[str] | None, typer.Argument(help="All must occur.")] = None,
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
        typer.echo("Nothing fits." if words else "The registry is empty.")


@app.command(epilog=f"Example: rollart registry info acme/Maze-v1 --registry {URL}")
def info(
    plugin_id: Annotated[str, typer.Argument(metavar="ID[@VERSION]", help="What to show.")],
    registry: RegistryOption = None,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show one package: what it provides, needs and runs, its check and its versions."""
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
    plugin_id: Annotated[str, typer.Argument(metavar="ID[@VERSION]", help="What to install.")],
    registry: RegistryOption = None,
    python: PythonOption = None,
    lock: LockOption = Path("rollart.lock"),
    lock_all: Annotated[
        bool,
        typer.Option(help="Lock what is installed already too, for an empty environment."),
    ] = False,
    allow_yanked: Annotated[bool, typer.Option(help="Take a yanked version too.")] = False,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Install a package: show what will run, ask, verify, install with hashes, write a lock."""
    from rollart_registry import install as installing
    from rollart_registry.client import opened
    from rollart_registry.names import parse_wanted
    from rollart_registry.plan import make_plan

    wanted = parse_wanted(plugin_id)
    if as_json and not yes:
        raise RegistryError("--json shows no plan to agree to: give --yes too, or leave --json out")
    trusted = trusted_registry(registry, root, fingerprint, yes)
    interpreter = _interpreter(python)
    with opened(trusted) as client:
        plan = make_plan(client, wanted, interpreter, allow_yanked=allow_yanked, lock_all=lock_all)
        if not as_json:
            _show_plan(plan, interpreter.python)
        if not yes:
            confirm("Install?", "nothing was installed; --yes agrees to what is shown")
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
        bool, typer.Option(help="Take other versions of what the lock found present.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Install exactly what a lock says."""
    from rollart_registry.install import sync as synced
    from rollart_registry.lock import read_lock

    done = synced(read_lock(lock), _interpreter(python), allow_drift=allow_drift)
    if as_json:
        print_json({"installed": list(done)})
    else:
        typer.echo(f"Installed {', '.join(done)}." if done else "All of it is installed already.")


@app.command(epilog="Example: rollart registry verify --lock rollart.lock")
def verify(
    registry: Annotated[
        str | None,
        typer.Argument(metavar="[REGISTRY]", help="A registry, and not what is installed."),
    ] = None,
    lock: LockOption = Path("rollart.lock"),
    python: PythonOption = None,
    root: RootOption = None,
    fingerprint: FingerprintOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare what is installed with its lock, or all files of a registry with their signatures."""
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
