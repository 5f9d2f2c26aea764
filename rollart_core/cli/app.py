"""The typer app: it has the commands' names, and imports a command when it is called.

Takes: the command line. Gives: the command's own behaviour. Never: imports a command before it is
called, or a plugin to show ``--help``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from rollart_core.cli.commands import COMMANDS


class LazyGroup(TyperGroup):
    """A group with names and summaries of commands, which imports a command when it is called."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, command in COMMANDS.items():
            self.add_command(TyperCommand(name=name, help=command.summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command itself; the help needs only its summary."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            self._add_plugin_commands()
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            example = f"Example: {COMMANDS[name].example}"
            command = _imported(name, _entry_point(name), example)
        return name, command, rest

    def _add_plugin_commands(self) -> None:
        """Add the commands of plugins. An unknown name is then rejected as usual."""
        from rollart_core.plugins.manager import plugins

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
        """Return the context of the command itself."""
        command = _imported(str(self.name), self._entry, None)
        return command.make_context(info_name, args, parent=parent, **extra)


def _entry_point(name: str) -> str:
    """Return the entry point of one of RollArt's own commands.

    Raises:
        PluginError: If the plugin that provides it is not installed, or is broken.
    """
    if (own := COMMANDS[name].entry_point) is not None:
        return own
    from rollart_core.errors import PluginError
    from rollart_core.plugins.manager import plugins

    registered = plugins().registered("commands").get(name)
    if registered is None:
        raise PluginError(f"no working plugin provides the command {name!r}, see `rollart list`")
    return registered.spec.entry_point


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
    # Plain help, because importing rich's panels takes a tenth of a second.
    app = typer.Typer(
        cls=LazyGroup,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        # Commands inherit it from their parent context.
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @app.callback(epilog="Example: rollart run examples/hello.yaml --dry-run")
    def rollart(
        version: bool = typer.Option(
            False, "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        """Train LLM agents with reinforcement learning; every component is a plugin.

        Plugins add further commands, such as swe and serve-reward: `rollart list commands`.
        """

    return app


def run_app() -> None:
    """Run the command line and exit; errors that are printed as one line are raised."""
    typer.main.get_command(build_app())(prog_name="rollart")
