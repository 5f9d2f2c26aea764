"""Built-in engines, weight channels, mappers, trackers and reward backends."""
