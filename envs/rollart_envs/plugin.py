"""The built-in environments, registered as any stranger's package registers its own."""

from rollart_core.contracts.env import EnvSpec
from rollart_core.hookspecs import hookimpl
from rollart_core.manifest import specs


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return the built-in environments."""
    return specs(__package__, "environments")
