"""Scheduling: which episodes run, which groups are trained, and when a run ends."""
