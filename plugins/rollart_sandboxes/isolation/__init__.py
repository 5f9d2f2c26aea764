"""Environments in a sandbox or a separate venv: the code inside, and their proxies outside."""
