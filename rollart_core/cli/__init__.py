"""The command line: parse, call, print; no logic of its own.

Takes: ``sys.argv``. Gives: an exit code: 0 when it did what was asked, 1 when it could not (with
one line on stderr for what a person can mend), 2 for a command line that does not parse.
Never: imports a command before it is called, nor a plugin to show ``--help``.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Command(NamedTuple):
    """A command that is imported when it is called."""

    entry_point: str
    """``module:function`` or ``module:app`` (a typer app with commands of its own)."""
    summary: str
    example: str


_HERE = "rollart_core.cli"

COMMANDS: dict[str, Command] = {
    "run": Command(
        f"{_HERE}.run:run",
        "Train a policy as a config file says.",
        "rollart run examples/hello.yaml trainer.lr=1e-4",
    ),
    "list": Command(
        f"{_HERE}.list:list_plugins",
        "List what is installed, of which kind, from which package, broken or not.",
        "rollart list environments --json",
    ),
    "info": Command(
        f"{_HERE}.info:info",
        "Show what one plugin says of itself, and the options it takes.",
        "rollart info webshop/WebShop-v1",
    ),
    "new-env": Command(
        f"{_HERE}.new:new_env",
        "Make a package with an environment that passes its own tests.",
        "rollart new-env acme-maze --id acme/Maze-v1 --non-interactive",
    ),
    "new-reward": Command(
        f"{_HERE}.new:new_reward",
        "Make a package with a reward function.",
        "rollart new-reward acme-brevity --non-interactive",
    ),
    "new-algorithm": Command(
        f"{_HERE}.new:new_algorithm",
        "Make a package with a training algorithm.",
        "rollart new-algorithm acme-loo --non-interactive",
    ),
    "new-mapper": Command(
        f"{_HERE}.new:new_mapper",
        "Make a package with a hardware mapper.",
        "rollart new-mapper acme-split --non-interactive",
    ),
    "play": Command(
        f"{_HERE}.play:play",
        "Play an environment in the terminal.",
        "rollart play webshop --task 3 --split test",
    ),
    "check": Command(
        f"{_HERE}.check:check_command",
        "Check a plugin, a project folder or a wheel: static, runtime and semantic.",
        "rollart check webshop/WebShop-v1",
    ),
    "audit": Command(
        f"{_HERE}.audit:audit",
        "Account for every ticket of a run, from its journal.",
        "rollart audit runs/hello-20260101-120000",
    ),
    "registry": Command(
        f"{_HERE}.registry:app",
        "Publish to a community registry, install from one, or run one.",
        "rollart registry install acme/Maze-v1 --registry https://rollart.example.org",
    ),
    "bench": Command(
        f"{_HERE}.bench:bench",
        "Run a benchmark, ours beside a peer's; without a name, list them.",
        "rollart bench engine --json",
    ),
    "model": Command(
        f"{_HERE}.model:app",
        "Make models.",
        "rollart model new ./my-model --env webshop width=128",
    ),
}


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and summary, and imports one when it is called."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, command in COMMANDS.items():
            self.add_command(TyperCommand(name=name, help=command.summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command itself, where the help only has its summary."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            self._add_plugin_commands()
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            listed = COMMANDS[name]
            command = _imported(name, listed.entry_point, f"Example: {listed.example}")
        return name, command, rest

    def _add_plugin_commands(self) -> None:
        """Add what plugins bring; an unknown name is then refused as usual."""
        from rollart_core.plugins import plugins

        for name, registered in plugins().registered("commands").items():
            self.add_command(_LazyPluginCommand(name=name, entry=registered.spec.entry_point))


class _LazyPluginCommand(TyperCommand):
    """A plugin's command, imported when it is parsed."""

    def __init__(self, *, name: str, entry: str) -> None:
        super().__init__(name=name)
        self._entry = entry

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Hand over to the command itself."""
        command = _imported(str(self.name), self._entry, None)
        return command.make_context(info_name, args, parent=parent, **extra)


def _imported(name: str, entry_point: str, epilog: str | None) -> Any:
    module, _, attribute = entry_point.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=name, epilog=epilog)(found)
        found = app
    command = typer.main.get_command(found)
    command.name = name
    return command


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"rollart {version('rollart')}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """Return the typer app."""
    # Plain help: rich's panels take a tenth of a second to import.
    app = typer.Typer(
        cls=LazyGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None
    )

    @app.callback(epilog="Example: rollart run examples/hello.yaml --dry-run")
    def rollart(
        version: bool = typer.Option(
            False, "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        """Train LLM agents with reinforcement learning; every part is a plugin.

        Plugins may add commands of their own: see them with `rollart list commands`.
        """

    return app


def main() -> None:
    """Run the command line and exit."""
    try:
        typer.main.get_command(build_app())(prog_name="rollart")
    except Exception as e:
        from rollart_core.errors import RollartError

        if not isinstance(e, RollartError) or os.environ.get("ROLLART_TRACEBACK"):
            raise
        typer.echo("\n".join(f"Error: {line}" for line in str(e).splitlines()), err=True)
        sys.exit(1)
