"""Run configs: sections, loading, and what is checked before a run."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return what the module of this name held, before it became a package."""
        from rollart_core.plugins.old_names import member_of_package

        return member_of_package(__name__, "rollart_core.config.run", name)
