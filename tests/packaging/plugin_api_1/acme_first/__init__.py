"""Parts written for version 1 of RollArt's plugin API."""
