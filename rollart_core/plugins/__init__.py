"""Plugins: hooks, loading, registry of ids, manifests, API versions."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a member of the module of this name, before it became a package."""
        from rollart_core.plugins.old_names import member_of_package

        return member_of_package(__name__, "rollart_core.plugins.manager", name)
