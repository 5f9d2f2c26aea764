"""The built-in environments, registered in the same way as those of any other package.

Takes: ``rollart.yaml`` in the same folder. Gives: the specs and commands. Never: imports an
environment.
"""

from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.spec import CommandSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return the built-in environments."""
    return specs(__package__, "environments")


@hookimpl
def rollart_commands() -> list[CommandSpec]:
    """Return the commands that belong to them."""
    return [
        CommandSpec(
            name="swe",
            entry_point="rollart_envs.swe.cli:app",
            summary="Make software-repair tasks from git repositories and packages.",
        )
    ]
