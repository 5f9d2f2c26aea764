"""Run configs: sections, loading, and the checks before a run."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a member that this name had when it was a module and not a package."""
        from rollart_core.plugins.old_names import member_of_package

        return member_of_package(__name__, "rollart_core.config.run", name)
