"""Built-in engines, weight channels, adapters, trackers and reward backends."""
