"""Built-in inference engines."""
