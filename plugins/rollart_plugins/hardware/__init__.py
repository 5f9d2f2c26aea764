"""Built-in hardware."""
