"""Plugins: hooks, loading, registry of ids, manifests, API versions."""
