"""Adapters: unmodified environments of other libraries as RollArt environments."""
