"""Built-in weights."""
