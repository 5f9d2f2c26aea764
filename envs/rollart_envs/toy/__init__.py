"""Small grid worlds as text: how little an environment needs."""
