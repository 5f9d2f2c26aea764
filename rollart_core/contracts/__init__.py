"""The seams of RollArt: what a plugin promises and what it may count on, one file a kind."""
