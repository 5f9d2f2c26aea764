"""Checks between the keys of a run config."""
