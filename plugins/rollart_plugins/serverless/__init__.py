"""Built-in reward backends."""
