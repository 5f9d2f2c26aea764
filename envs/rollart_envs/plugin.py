"""The built-in environments, registered as any stranger's package registers its own.

Takes: ``rollart.yaml`` beside it. Gives: the specs, and the commands that go with them. Never:
imports an environment.
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
