"""Judging functions in a sandbox."""
