"""Built-in weight channels."""
