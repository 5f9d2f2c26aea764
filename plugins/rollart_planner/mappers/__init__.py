"""The built-in hardware mappers."""
