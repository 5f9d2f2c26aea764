"""Small grid worlds as text: examples of minimal environments."""
