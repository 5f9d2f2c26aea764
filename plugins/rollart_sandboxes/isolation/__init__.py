"""Environments in a box or a venv of their own: what runs inside, and who stands in for them."""
