"""Shared options and prompts of the ``rollart registry`` commands.

Takes: flags and the user's answers. Gives: a trusted registry, a signer, a confirmation. Never:
confirms without an answer or a flag.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from rollart_core.cli.output import visible
from rollart_core.errors import RegistryError, UserError

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from rollart_registry.release import Release
    from rollart_registry.trust import Trusted

NEEDED: Final = frozenset({"cryptography", "securesystemslib", "tuf"})
"""The import packages that the extra ``registry`` installs."""


class RegistryGroup(TyperGroup):
    """A command group that reports a missing package of the extra ``registry``."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            UserError: If such a package is missing.
        """
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as e:
            package = (e.name or "").partition(".")[0]
            if package not in NEEDED:
                raise
            raise UserError(
                f"rollart registry needs {package}: pip install 'rollart[registry]'"
            ) from e


app = typer.Typer(
    cls=RegistryGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True
)

URL = "https://rollart.example.org"
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="ROLLART_REGISTRY",
        help="The registry's folder or http(s) URL. Optional if exactly one registry is trusted.",
    ),
]
RootOption = Annotated[
    Path | None, typer.Option(help="The registry's root metadata from a trusted source.")
]
FingerprintOption = Annotated[
    str | None, typer.Option(help="The expected SHA-256 of the root of a new registry.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to every question.")]
PythonOption = Annotated[
    Path | None, typer.Option(help="The target Python interpreter. Default: this one.")
]
FolderOption = Annotated[Path, typer.Argument(metavar="REGISTRY", help="The registry's folder.")]
KeysOption = Annotated[
    Path | None, typer.Option(help="The folder with the operator's keys. Default: REGISTRY-keys.")
]
KeyOption = Annotated[Path, typer.Option(help="The owner's private key.")]
OwnerNameOption = Annotated[
    str | None, typer.Option("--owner", help="The owner. Required if the key signs for several.")
]
ToOption = Annotated[
    Path | None,
    typer.Option(help="Write the submission to this folder instead of the registry."),
]
LockOption = Annotated[Path, typer.Option("--lock", help="The lock file.")]


MOST_DAYS = 36_500.0
"""A hundred years: keeps expiry dates within the range of datetime."""


def days_option(help_: str) -> Any:
    """Return an option for the days until a signature expires."""
    return typer.Option(callback=_in_bounds, help=help_)


def _in_bounds(value: float | None) -> float | None:
    """Refuse a number of days that is not positive, or too large."""
    if value is not None and not 0 < value <= MOST_DAYS:
        raise typer.BadParameter(f"{value:g} days: must be above 0 and at most {MOST_DAYS:g}")
    return value


@app.callback(epilog=f"Example: rollart registry search maze --registry {URL}")
def registry() -> None:
    """Publish environments to a community registry, install from one, or run one.

    The page "Registry" of the documentation shows every step for an operator, an owner and a user.
    """
    import logging

    # The HTTP library warns of every retry; the final error is reported in one line instead.
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def run_check(wheel: str) -> Mapping[str, Any]:
    """Run the conformance suite on a wheel."""
    from rollart_testing.check import check

    return check(wheel).to_json()


def trusted_registry(
    location: str | None, root: Path | None, fingerprint: str | None, yes: bool
) -> Trusted:
    """Return a trusted registry; ask the user to confirm a new one."""
    from rollart_registry import trust
    from rollart_registry.fetcher import base_url

    if location is None:
        known = trust.all_trusted()
        if len(known) != 1:
            names = ", ".join(t.base for t in known) or "none is trusted yet"
            raise RegistryError(f"no registry given: use --registry FOLDER|URL ({names})")
        return known[0]
    base = base_url(location)
    before = trust.trusted(base)
    if before is not None and root is None and fingerprint in {None, before.fingerprint}:
        return before
    try:
        offered = root.read_bytes() if root else trust.offered_root(base)
    except OSError as e:
        raise RegistryError(f"cannot read {root}: {e.strerror}") from e
    trust.check_root(offered)
    found = trust.fingerprint(offered)
    if fingerprint is not None and fingerprint.lower() != found:
        raise RegistryError(f"{base} has the root {found}, not {fingerprint}: it is not trusted")
    if root is None and fingerprint is None:
        typer.echo(f"{base} is new here. Its root has the fingerprint\n  {found}", err=True)
        if not yes:
            confirm(
                "Does its operator publish this fingerprint?",
                f"give --fingerprint {found} if its operator confirms it, or --root FILE",
            )
    return trust.trust(base, offered)


def confirm(question: str, otherwise: str) -> None:
    """Ask for confirmation; without a yes, raise an error that names the alternative."""
    if not sys.stdin.isatty():
        raise RegistryError(f"no terminal to answer {question!r}: {otherwise}")
    if not typer.confirm(question, err=True):
        raise RegistryError(f"the answer was no: {otherwise}")


def new_passphrase() -> str | None:
    """Return the passphrase for a new key; None or empty means no encryption."""
    from rollart_registry.keys import PASSPHRASE_VARIABLE

    given = os.environ.get(PASSPHRASE_VARIABLE)
    if given is not None or not sys.stdin.isatty():
        return given
    question = "Passphrase for the new key (empty: none)"
    answer: str = typer.prompt(
        question,
        default="",
        show_default=False,
        hide_input=True,
        confirmation_prompt=True,
        err=True,
    )
    return answer


def ask(question: str) -> str:
    """Ask for a passphrase."""
    if not sys.stdin.isatty():
        from rollart_registry.keys import PASSPHRASE_VARIABLE

        raise RegistryError(f"{question}? No terminal to ask on; set {PASSPHRASE_VARIABLE}")
    answer: str = typer.prompt(question, hide_input=True, err=True)
    return answer


def signer_at(key: Path) -> CryptoSigner:
    """Return the signer of a private key's file."""
    from rollart_registry.keys import load_signer

    return load_signer(key, ask)


def release_line(release: Release) -> str:
    """Return a release in one line."""
    line = f"{release} (yanked: {release.yanked})" if release.yanked is not None else str(release)
    return visible(line)


def number_of(count: int, noun: str) -> str:
    """Return ``1 package``, ``2 packages``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
